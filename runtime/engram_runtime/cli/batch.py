"""`engram batch`: many prompts through the engine in this process, as fast as it goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engram_runtime.cli.lazy import load
from engram_runtime.cli.serve import add_model_flags


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        help="run a file of prompts without a server",
        description="Run prompts through the engine in this process. A .jsonl file holds one object per line with "
        "`prompt` or `messages` and, if wanted, the sampling fields of the API; any other file one prompt per line. "
        "Results leave in the order of the file: JSON lines, or plain text with --text.",
    )
    add_model_flags(parser)
    parser.add_argument("--prompts-file", type=Path, required=True, metavar="FILE", help="prompts; - is standard input")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument("--text", action="store_true", help="print the replies only")
    parser.add_argument("--no-chat-template", action="store_true", help="send plain prompts as they are")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="of each reply, unless its line says (default: 128)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: 1")
    parser.add_argument("--show-stats", action="store_true", help="tokens and rates on standard error at the end")
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    return int(load("engram_runtime.cli.batching:run", command="batch")(options))
