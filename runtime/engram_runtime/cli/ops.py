"""`engram ops`: which implementation each op would use here, and why."""

from __future__ import annotations

import argparse
from typing import Any

from engram_runtime.cli.lazy import CommandError, load
from engram_runtime.cli.quantities import override


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "ops",
        help="show which implementation each op uses, and why",
        description="Print every op, the backend that serves it on this device and dtype, and the reason.",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--op", type=override, action="append", default=[], metavar="OP=BACKEND", help="force a backend"
    )
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    registry = load("engram_kernels.registry:Registry", command="ops").default()
    try:
        choices = registry.explain(options.device, options.dtype, dict(options.op))
    except RuntimeError as error:  # BackendUnavailable, or a device torch does not know
        raise CommandError(str(error)) from error
    widths = [max(len(row) for row in column) for column in zip(*((c.op, c.backend) for c in choices), strict=True)]
    for choice in choices:
        print(f"{choice.op:<{widths[0]}}  {choice.backend:<{widths[1]}}  {choice.why}")
    return 0
