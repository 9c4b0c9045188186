"""What `helm test` runs: a conversation of two turns with a served model, and a check that the second was restored.

The standard library alone, and nothing of this package: it runs in a pod without rights and checks the installation
from where an application stands.

    python3 -m engram_operator.chat_check --model NAME --service-url http://NAME.NAMESPACE.svc:8000
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BLOCK = 16  # tokens: the last block of a turn may be partly filled, and only whole blocks are shared
RETRIED = frozenset({429, 502, 503, 504})
PAUSE_S = 2.0
FIRST = (
    "We are planning a garden together. There will be three beds: the first holds tomatoes and basil, the second holds "
    "beans that climb on poles, and the third holds strawberries under a net. Please remember the order of the beds. "
    "Which bed gets the strawberries?"
)
SECOND = "And which plants climb?"

Turn = dict[str, Any]
Post = Callable[[str, Turn, float], Turn]


class CheckFailed(Exception):
    """What is wrong, for the person who reads the test pod's log."""


def check(
    post: Post,
    *,
    model: str,
    service_url: str,
    replica_url: str,
    timeout_s: float,
    pause_s: float = PAUSE_S,
    log: Callable[[str], None] = print,
) -> None:
    """Three requests: one through the Service, which may have to wake the model, then two turns to one replica.

    CheckFailed when no answer comes in time, or when the second turn computed again what the first had computed.
    """
    ends = time.monotonic() + timeout_s

    def ask(url: str, conversation: str, messages: Sequence[dict[str, str]]) -> Turn:
        return _ask(post, url, _turn(model, conversation, messages), ends, pause_s)

    reply = ask(service_url, uuid.uuid4().hex, [_said("user", "Say hello.")])
    log(f"{service_url} answers: {_text(reply)!r}")
    conversation = uuid.uuid4().hex
    messages = [_said("user", FIRST)]
    first = ask(replica_url, conversation, messages)
    messages += [_said("assistant", _text(first)), _said("user", SECOND)]
    second = ask(replica_url, conversation, messages)
    for name, turn in (("first", first), ("second", second)):
        tokens = turn.get("usage", {}).get("prompt_tokens")
        said = turn.get("engram", {})
        log(
            f"{name} turn: {tokens} prompt tokens, {said.get('restored_tokens')} restored from {said.get('tier')}, "
            f"{said.get('prefilled_tokens')} computed"
        )
    before = int(first["usage"]["prompt_tokens"])
    restored = int(second.get("engram", {}).get("restored_tokens") or 0)
    if restored <= before - BLOCK:
        raise CheckFailed(
            f"the second turn restored {restored} tokens, expected about the {before} of the first; "
            f"the engine says: {json.dumps(second.get('engram'))}"
        )
    log(f"the second turn computed {second['engram'].get('prefilled_tokens')} tokens and restored {restored}: good")


def http_post(token: str | None) -> Post:
    """POST with JSON both ways. No proxy: the addresses are the cluster's own."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def post(url: str, body: Turn, timeout_s: float) -> Turn:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with opener.open(request, timeout=timeout_s) as response:
            answer: Turn = json.load(response)
        return answer

    return post


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _turn(model: str, conversation: str, messages: Sequence[dict[str, str]]) -> Turn:
    return {
        "model": model,
        "messages": list(messages),
        "max_tokens": 16,
        "temperature": 0,
        "conversation_id": f"helm-test-{conversation}",
    }


def _text(reply: Turn) -> str:
    return str(reply["choices"][0]["message"]["content"])


def _ask(post: Post, url: str, body: Turn, ends: float, pause_s: float) -> Turn:
    """One turn, tried again while the model is still starting. CheckFailed at the deadline, or when it is refused."""
    last = "no answer"
    while (left := ends - time.monotonic()) > 0:
        try:
            return post(f"{url}/v1/chat/completions", body, left)
        except urllib.error.HTTPError as error:
            last = f"status {error.code}: {error.read(2000).decode(errors='replace')}"
            if error.code not in RETRIED:
                raise CheckFailed(f"{url}: {last}") from error
        except (OSError, ValueError) as error:
            last = str(error)
        time.sleep(min(pause_s, max(0.0, ends - time.monotonic())))
    raise CheckFailed(f"{url}: gave up waiting; the last try said: {last}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chat_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="name that clients send")
    parser.add_argument("--service-url", required=True)
    parser.add_argument("--replica-url", help="one replica, for the two turns; default: the Service")
    parser.add_argument("--token-file", type=Path, help="file with an API key")
    parser.add_argument("--timeout-seconds", type=float, default=300.0)
    options = parser.parse_args(arguments)
    token = options.token_file.read_text().strip() if options.token_file else None
    try:
        check(
            http_post(token),
            model=options.model,
            service_url=options.service_url,
            replica_url=options.replica_url or options.service_url,
            timeout_s=options.timeout_seconds,
        )
    except CheckFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
