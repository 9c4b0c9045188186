"""The main job, shown on real weights: a conversation goes on after the engine was killed, computing only new tokens.

Four parts, each with its own engine and its own store:

1. never killed: an unchanged LiteLLM application holds a 12-turn chat;
2. killed: the same, but the engine is killed with SIGKILL after turn 6 and started again. Same token ids as in 1;
3. zeroed: as 2, but the stored state is overwritten with zeros and checks are off. The token ids must differ from 1:
   so in 2 it was the restored state that answered;
4. recall: a second turn that sends only the new message and names what to restore.

Prints a table and the verdicts, writes both as JSON, and exits non-zero when a verdict fails or when any token of the
history was prefilled a second time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM looks for its price list on the internet

import litellm
from harness import HERE, SERVED_NAME, Application, DemoError, Deployment, zero_states
from transformers import AutoTokenizer

import engram_litellm  # noqa: F401  registers the provider "engram"

KILL_AFTER = 6
ROOT = HERE.parent.parent
SECRET = "pineapple"
PROBES = ("Hi there", "What is 7")


def fetch_model() -> Path:
    """The demo's checkpoint, fetched once into the user's cache."""
    script = ROOT / "scripts" / "fetch_smollm2.py"
    done = subprocess.run([sys.executable, str(script)], check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip().splitlines()[-1])


def free_port_base(first: int = 30000) -> int:
    """The first port pair (HTTP, admin = HTTP + 1000) of which both are free on loopback."""
    for base in range(first, first + 1000, 10):
        with socket.socket() as http, socket.socket() as admin:
            try:
                http.bind(("127.0.0.1", base))
                admin.bind(("127.0.0.1", base + 1000))
            except OSError:
                continue
            return base
    raise DemoError(f"no free pair of ports from {first} on")


class Accountant:
    """Counts, from the tokenizer alone, what a turn may compute: the tokens after the history that was seen before."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def new_tokens(self, messages: list[dict[str, str]]) -> int:
        """Tokens of the prompt from where the last user message begins; all of them on the first turn."""
        whole = self.render(messages)
        if len(messages) == 1:
            return len(whole)
        first, second = (self.render([*messages[:-1], {"role": "user", "content": probe}]) for probe in PROBES)
        shared = next(i for i, (a, b, c) in enumerate(zip(whole, first, second, strict=False)) if not a == b == c)
        return len(whole) - shared

    def ids(self, tokens: list[str]) -> list[int]:
        """Ids of the token strings that the API reports."""
        vocabulary = {self._tokenizer.decode([i]): i for i in range(len(self._tokenizer))}
        return [vocabulary.get(token, -1) for token in tokens]


def conversation(
    deployment: Deployment, accountant: Accountant, questions: list[str], *, max_tokens: int, kill: bool, zero: bool
) -> list[dict[str, Any]]:
    """Hold the chat through the application; kill (and zero what is stored) after turn KILL_AFTER when asked."""
    application = Application(deployment, max_tokens)
    messages: list[dict[str, str]] = []
    turns = []
    try:
        for number, question in enumerate(questions, 1):
            messages.append({"role": "user", "content": question})
            allowed = accountant.new_tokens(messages)
            turn = application.ask(question)
            messages.append({"role": "assistant", "content": turn["content"]})
            engram = turn["engram"]
            turns.append({"turn": number, "new_tokens": allowed, "question": question, **turn})
            show(number, turn)
            deployment.wait_settled(engram["conversation_id"], engram["turn_number"])
            if kill and number == KILL_AFTER:
                pids = deployment.kill_engine()
                print(f"   engine {', '.join(map(str, pids))} killed with SIGKILL", flush=True)
                if zero:
                    print(f"   {zero_states(deployment.stored_files()):,} stored bytes zeroed", flush=True)
                deployment.wait_ready()
    finally:
        application.close()
    return turns


def show(number: int, turn: dict[str, Any]) -> None:
    usage, engram = turn["usage"], turn["engram"]
    print(
        f"{number:>5} {usage['prompt_tokens']:>7} {engram['restored_tokens']:>9} {engram['prefilled_tokens']:>10}"
        f" {engram['tier'] or '-':>6} {engram['restore_time_ms'] or 0:>11.1f} {turn['first_token_ms']:>15.0f}"
        f"   {turn['content'][:44]!r}",
        flush=True,
    )


HEADER = " turn  prompt  restored  prefilled   tier  restore ms  first token ms   reply"


def recall(deployment: Deployment) -> dict[str, Any]:
    """Turn 2 sends only the new message; with nothing restored the model cannot know the answer."""
    model = f"engram/{SERVED_NAME}"
    common = {"model": model, "api_base": deployment.url, "temperature": 0, "max_tokens": 24}
    telling = f"The secret word is {SECRET}. Please remember the secret word."
    told = litellm.completion(messages=[{"role": "user", "content": telling}], **common)
    first = told.choices[0].message.provider_specific_fields["engram"]
    deployment.wait_settled(first["conversation_id"], first["turn_number"])
    deployment.kill_engine()
    deployment.wait_ready()
    question = [{"role": "user", "content": "What is the secret word?"}]
    source = f"{first['conversation_id']}:{first['turn_number']}"
    answered = litellm.completion(messages=question, extra_body={"restore_from": source}, **common)
    blank = litellm.completion(messages=question, **common)
    second = answered.choices[0].message.provider_specific_fields["engram"]
    print(f"   asked with restore_from {source}: {answered.choices[0].message.content!r}")
    print(f"   asked with nothing restored: {blank.choices[0].message.content!r}", flush=True)
    return {
        "restore_from": source,
        "answer": answered.choices[0].message.content,
        "answer_without_restore": blank.choices[0].message.content,
        "prompt_tokens": answered.usage.prompt_tokens,
        "restored_tokens": second["restored_tokens"],
        "prefilled_tokens": second["prefilled_tokens"],
        "tier": second["tier"],
    }


def run_parts(args: argparse.Namespace, checkpoint: Path, folder: Path) -> dict[str, Any]:
    accountant = Accountant(checkpoint)
    questions = (HERE / "questions.txt").read_text().splitlines()[: args.turns]
    parts: dict[str, Any] = {}
    for name, title, kill, zero in (
        ("never_killed", "1. never killed", False, False),
        ("killed", f"2. killed after turn {KILL_AFTER}, started again", True, False),
        ("zeroed", f"3. killed after turn {KILL_AFTER}, stored state zeroed, checks off", True, True),
    ):
        print(f"\n{title}\n{HEADER}", flush=True)
        extra = ["--unsafe-skip-snapshot-checks"] if zero else []
        with Deployment(folder / name, checkpoint, extra_args=extra, port_base=args.port_base) as deployment:
            parts[name] = conversation(
                deployment, accountant, questions, max_tokens=args.max_tokens, kill=kill, zero=zero
            )
    print("\n4. recall: the second turn sends only the new message", flush=True)
    with Deployment(folder / "recall", checkpoint, extra_args=None, port_base=args.port_base) as deployment:
        parts["recall"] = recall(deployment)
    for name in ("never_killed", "killed", "zeroed"):
        for turn in parts[name]:
            turn["token_ids"] = accountant.ids(turn["tokens"])
    return parts


def verdicts(parts: dict[str, Any]) -> dict[str, bool]:
    """What the demo claims, each as something that can fail."""
    ids = {name: [turn["token_ids"] for turn in parts[name]] for name in ("never_killed", "killed", "zeroed")}
    after_kill = parts["killed"][KILL_AFTER]["engram"]
    return {
        "every reply has tokens": all(turn for name in ids for turn in ids[name]),
        "killed: same token ids as never killed": ids["killed"] == ids["never_killed"],
        "killed: the turn after the kill was restored from disk or store": after_kill["tier"] in ("disk", "store")
        and after_kill["restored_tokens"] > 0,
        "zeroed: token ids differ, so it was the restored state that answered": ids["zeroed"][:KILL_AFTER]
        == ids["never_killed"][:KILL_AFTER]
        and ids["zeroed"][KILL_AFTER:] != ids["never_killed"][KILL_AFTER:],
        "no history token was prefilled twice": all(
            turn["engram"]["prefilled_tokens"] <= turn["new_tokens"]
            for name in ("never_killed", "killed")
            for turn in parts[name]
        ),
        "recall: the secret came back though only the new message was sent": SECRET
        in (parts["recall"]["answer"] or "").lower(),
        "recall: unknown when nothing is restored": SECRET
        not in (parts["recall"]["answer_without_restore"] or "").lower(),
        "recall: restored, not prefilled": parts["recall"]["restored_tokens"] > parts["recall"]["prefilled_tokens"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"), help="where the result goes (JSON)")
    parser.add_argument("--turns", type=int, default=12, help="turns of the conversation (more than 6)")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens of each reply")
    parser.add_argument("--port-base", type=int, help="port of the engine (default: the first free one from 30000)")
    args = parser.parse_args()
    if not KILL_AFTER < args.turns <= 12:
        parser.error(f"--turns must be between {KILL_AFTER + 1} and 12")

    args.port_base = args.port_base or free_port_base()
    started = time.monotonic()
    checkpoint = fetch_model()
    folder = args.output.resolve().parent / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    parts = run_parts(args, checkpoint, folder)
    checks = verdicts(parts)

    print()
    for name in ("never_killed", "killed"):
        total = {
            key: sum(turn["engram"][key] for turn in parts[name])
            for key in ("restored_tokens", "prefilled_tokens", "rewarmed_tokens")
        }
        prompt = sum(turn["usage"]["prompt_tokens"] for turn in parts[name])
        print(
            f"{name}: {prompt:,} prompt tokens, {total['restored_tokens']:,} restored, "
            f"{total['prefilled_tokens']:,} prefilled, {total['rewarmed_tokens']:,} rewarmed in the background"
        )
    for claim, holds in checks.items():
        print(f"{'PASS' if holds else 'FAIL'}  {claim}")
    seconds = time.monotonic() - started
    result = {
        "model": "SmolLM2-135M-Instruct (Q4_1 weights dequantised)",
        "machine": f"{platform.platform()}, {platform.machine()}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "verdicts": checks,
        "parts": parts,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{seconds:.0f} s; everything is in {args.output}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
