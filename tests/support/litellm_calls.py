"""Calls of LiteLLM for a test that runs with another version of it: arguments in, responses out, a JSON line each."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback

import litellm

import engram_litellm

REGISTERED = engram_litellm.engram


def main() -> None:
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # whatever else LiteLLM has to say
        for line in sys.stdin:
            try:
                answer = litellm.completion(**json.loads(line)).model_dump()
            except Exception:
                answer = {"raised": traceback.format_exc()}
            answers.write(json.dumps(answer, default=str) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
