"""`engram chat`: a conversation in the terminal, with a running server or with a checkpoint in this process."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from engram_runtime.cli.client import Client
from engram_runtime.cli.lazy import CommandError, load
from engram_runtime.cli.serve import add_model_flags
from engram_runtime.settings import Settings

HELP = "/clear  start over    /system TEXT  set the system prompt    /stats  memory of each turn    /exit"


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a running server (--base-url) or to a checkpoint loaded in this process (--model). "
        f"While chatting: {HELP}",
    )
    parser.add_argument("--base-url", metavar="URL", help="a running server (default: $ENGRAM_BASE_URL or port 8000)")
    parser.add_argument("--api-key", metavar="KEY", help="default: $ENGRAM_API_KEY")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--conversation-id", metavar="ID", help="name the conversation; default: the server names it")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest reply (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="default: 0.7")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: 1")
    parser.add_argument("--stats", action="store_true", help="after each turn, what was restored and what computed")
    add_model_flags(parser)
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    if options.model is not None and options.base_url is not None:
        raise CommandError("--model and --base-url exclude each other")
    server: AbstractContextManager[str | None] = nullcontext(options.base_url)
    if options.model is not None:
        server = load("engram_runtime.cli.embedded:embedded_server", command="chat")(options)
    with server as url, Client(url, options.api_key, Settings.from_environment()) as client:
        return Conversation(client, options).loop()


class Conversation:
    """Holds the history, as any OpenAI client does; the server finds what it remembers of it."""

    def __init__(self, client: Client, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self._model = str(client.call("GET", "/v1/models")["data"][0]["id"])
        self._system: str | None = options.system
        self._conversation_id: str | None = options.conversation_id
        self._messages: list[dict[str, str]] = []

    def loop(self) -> int:
        interactive = sys.stdin.isatty()
        if interactive:
            load("engram_runtime.cli.lineedit:enable", command="chat")()
            print(f"{self._model} on {self._client.url}. {HELP}", file=sys.stderr)
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return 0
            if not line:
                continue
            if line in ("/exit", "/quit"):
                return 0
            if line.startswith("/"):
                self._command(line)
                continue
            try:
                self._turn(line)
            except CommandError as error:
                self._messages.pop()
                print(f"engram: {error}", file=sys.stderr)
                if not interactive:
                    return 1
            except KeyboardInterrupt:  # stops the reply, not the conversation
                self._messages.pop()
                print(file=sys.stderr)

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/clear":
            self._messages, self._conversation_id = [], None
        elif word == "/system":
            self._system, self._messages, self._conversation_id = rest or None, [], None
        elif word == "/stats":
            self._options.stats = not self._options.stats
        else:
            print(HELP, file=sys.stderr)

    def _turn(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [*system, *self._messages],
            "max_tokens": self._options.max_tokens,
            "temperature": self._options.temperature,
            "top_p": self._options.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._conversation_id is not None:
            body["conversation_id"] = self._conversation_id
        reply, last = "", {}
        for data in self._client.stream("/v1/chat/completions", body):
            last = data
            for choice in data["choices"]:
                piece = choice["delta"].get("content") or ""
                reply += piece
                print(piece, end="", flush=True)
        print(flush=True)
        self._messages.append({"role": "assistant", "content": reply})
        engram, usage = last.get("engram"), last.get("usage")
        if engram is not None:
            self._conversation_id = engram["conversation_id"]
        if self._options.stats and engram is not None and usage is not None:
            tier = f" from {engram['tier']}" if engram["tier"] else ""
            print(
                f"[turn {engram['turn_number']}: {usage['prompt_tokens']} prompt tokens, "
                f"{engram['restored_tokens']} restored{tier}, "
                f"{engram['prefilled_tokens']} computed, {usage['completion_tokens']} generated]",
                file=sys.stderr,
            )
