"""`engram autotune`: search launch parameters for a model's layers on this machine's GPU, once, before serving."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engram_runtime.cli.lazy import load


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "autotune",
        help="find the fastest kernels for a model on this GPU",
        description="Try every launch configuration of the linear layers of a checkpoint at 1 to 64 rows on this "
        "machine's GPU. Each candidate's output is compared with fp32 before it is timed. What wins is kept per GPU, "
        "op, shape and Triton version, and used by every later start. The weights are not read.",
    )
    parser.add_argument("--model", metavar="PATH", required=True, help="checkpoint folder; only config.json is read")
    parser.add_argument(
        "--rows",
        type=_rows,
        default=(1, 2, 4, 8, 16, 32, 64),
        metavar="N,N,...",
        help="batch sizes to tune for, powers of two up to 64 (default: 1,2,4,8,16,32,64)",
    )
    parser.add_argument(
        "--seconds", type=float, default=1800.0, metavar="SECONDS", help="start no new shape after this (default: 1800)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the tables (default: $XDG_CACHE_HOME/engram/tuning)"
    )
    parser.set_defaults(func=run)


def _rows(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers separated by commas, got {text!r}") from None
    if not all(1 <= count <= 64 and count & (count - 1) == 0 for count in rows):
        raise argparse.ArgumentTypeError(f"powers of two from 1 to 64, got {text!r}")
    return rows


def run(options: argparse.Namespace) -> int:
    return int(load("engram_runtime.cli.autotuning:run", command="autotune")(options))
