"""`engram autotune`: search launch parameters for a model's layers on this machine's GPU, once, before serving."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from engram_runtime.cli.lazy import CommandError, load
from engram_runtime.cli.quantities import seconds

OPS = ("attention", "experts", "linear")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "autotune",
        help="find the fastest kernels for a model on this GPU",
        description="Try every launch configuration of the attention, the experts and the linear layers of a "
        "checkpoint on this machine's GPU. Each candidate's output is compared with fp32 before it is timed. What wins "
        "is kept per GPU, op, shape and Triton version, and used by every later start. The weights are not read. A run "
        "that was cut short is taken up where it ended.",
    )
    parser.add_argument("--model", metavar="PATH", required=True, help="checkpoint folder; only config.json is read")
    parser.add_argument(
        "--ops",
        type=_ops,
        default=OPS,
        metavar="OP,OP,...",
        help=f"which ops, in this order (default: {','.join(OPS)})",
    )
    parser.add_argument(
        "--rows",
        type=_rows,
        default=(1, 2, 4, 8, 16, 32, 64),
        metavar="N,N,...",
        help="batch sizes to tune for, powers of two up to 64 (default: 1,2,4,8,16,32,64)",
    )
    parser.add_argument(
        "--tokens",
        type=_tokens,
        default=(128, 256, 512, 1024, 2048, 4096, 8192),
        metavar="N,N,...",
        help="larger steps to tune for, powers of two from 128 to 8192 (default: all of them); linear layers up to 512 "
        "in steps of 64",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="NAME",
        help="bfloat16 or float16 where the checkpoint is served in another dtype than its own",
    )
    parser.add_argument(
        "--seconds", type=seconds, default="30m", metavar="TIME", help="try nothing more after this (default: 30m)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the tables (default: $XDG_CACHE_HOME/engram/tuning)"
    )
    parser.add_argument("--force", action="store_true", help="search also what the table has already")
    parser.add_argument(
        "--workers",
        type=_workers,
        default=max(0, min(8, (os.cpu_count() or 1) - 2)),
        metavar="N",
        help="processes that compile candidates ahead, each with a context on the GPU; 0: none (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only say how many candidates would be tried; needs no GPU"
    )
    parser.set_defaults(func=run)


def _ops(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not all(name in OPS for name in names):
        raise argparse.ArgumentTypeError(f"some of {', '.join(OPS)}, got {text!r}")
    return names


def _workers(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"a number of processes, 0 for none, got {text!r}")
    return int(text)


def _rows(text: str) -> tuple[int, ...]:
    return _powers(text, 1, 64)


def _tokens(text: str) -> tuple[int, ...]:
    return _powers(text, 128, 8192)


def _powers(text: str, least: int, most: int) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers separated by commas, got {text!r}") from None
    if not all(least <= size <= most and size & (size - 1) == 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"powers of two from {least} to {most}, got {text!r}")
    return tuple(sorted(set(sizes)))


def run(options: argparse.Namespace) -> int:
    # Asked before the kernels are loaded: without a GPU there may be no Triton to load.
    if not options.dry_run and not load("torch:cuda", command="autotune").is_available():
        raise CommandError("autotune needs a GPU: torch finds no CUDA device")
    return int(load("engram_runtime.cli.autotuning:run", command="autotune")(options))
