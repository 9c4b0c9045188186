"""`engram activator`: stands in for the models of a namespace that have no pods, and wakes them up by being asked."""

from __future__ import annotations

import argparse
from typing import Any

from engram_runtime.cli.admin import add_admin_flags
from engram_runtime.cli.lazy import load
from engram_runtime.cli.quantities import seconds, size


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "activator",
        help="hold requests for models that sleep until they are awake",
        description="Stands where a model scaled to zero has its Service: holds each request (bounded in number, bytes "
        "and time), says on the admin port's /waiting for which models something waits, and passes the request on when "
        "one of the model's pods is ready. Models are told apart by the first label of Host. SIGTERM drains.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=int, default=8000, help="stands in for the models' (default: 8000)")
    parser.add_argument("--admin-port", type=int, default=8001, help="/waiting, /metrics, /health (default: 8001)")
    parser.add_argument(
        "--namespace", metavar="NAME", help="of the models, for {namespace} in --upstream (default: $POD_NAMESPACE)"
    )
    parser.add_argument(
        "--upstream",
        default="http://{name}-pods.{namespace}.svc:8000",
        metavar="URL",
        help="where a model's ready pods are (default: http://{name}-pods.{namespace}.svc:8000)",
    )
    parser.add_argument(
        "--max-waiting", type=int, default=1024, metavar="N", help="requests held; more get 503 (default: 1024)"
    )
    parser.add_argument(
        "--max-held-size", type=size, default="64Mi", metavar="SIZE", help="of their bodies together (default: 64Mi)"
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        default="5m",
        metavar="TIME",
        help="how long a request is held before it gets 503 with Retry-After (default: 5m)",
    )
    parser.add_argument(
        "--poll-interval", type=seconds, default="0.25", metavar="TIME", help="between two looks (default: 0.25)"
    )
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="from SIGTERM to exit (default: 30)"
    )
    add_admin_flags(parser)
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    return int(load("engram_runtime.cli.activating:run", command="activator")(options))
