"""A plain LiteLLM chat application: reads a question per line, streams the reply, keeps the history itself.

Nothing in it knows of snapshots: apart from the import that registers the provider it would run unchanged against any
OpenAI-compatible model. Type into it, or pipe questions into it:

    python examples/demo/chat.py --model engram/smollm
    python examples/demo/chat.py --model engram/smollm --json < questions.txt
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import litellm

import engram_litellm  # noqa: F401  registers the provider "engram"


def reply(model: str, messages: list[dict[str, str]], max_tokens: int, show: bool) -> dict[str, Any]:
    """One turn: the text, its tokens, what the engine reported, and the milliseconds to the first token."""
    started = time.perf_counter()
    first_token: float | None = None
    tokens: list[str] = []
    chunks: list[Any] = []
    for chunk in litellm.completion(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=max_tokens,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    ):
        chunks.append(chunk)
        if not chunk.choices:
            continue
        choice = chunk.choices[0]
        if choice.delta.content:
            first_token = first_token or time.perf_counter()
            if show:
                print(choice.delta.content, end="", flush=True)
        content = getattr(getattr(choice, "logprobs", None), "content", None) or []
        tokens.extend(entry["token"] if isinstance(entry, dict) else entry.token for entry in content)
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    message = whole.choices[0].message
    fields = getattr(message, "provider_specific_fields", None) or {}
    return {
        "content": message.content or "",
        "finish_reason": whole.choices[0].finish_reason,
        "tokens": tokens,
        "usage": json.loads(whole.usage.model_dump_json()),
        "engram": fields.get("engram", {}),
        "first_token_ms": ((first_token or time.perf_counter()) - started) * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="engram/smollm", help="LiteLLM model name")
    parser.add_argument("--max-tokens", type=int, default=24, help="longest reply, in tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object per turn instead of text")
    args = parser.parse_args()

    litellm.suppress_debug_info = True  # else stream_chunk_builder prints help texts between the replies
    messages: list[dict[str, str]] = []
    for line in sys.stdin:
        question = line.strip()
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        turn = reply(args.model, messages, args.max_tokens, show=not args.json)
        messages.append({"role": "assistant", "content": turn["content"]})
        print(json.dumps(turn) if args.json else "", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
