"""`engram serve`: every flag says what it does, and one that cannot be honoured is an error at start-up."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engram_runtime.cli.admin import add_admin_flags
from engram_runtime.cli.lazy import load
from engram_runtime.cli.quantities import override, seconds, size
from engram_runtime.cli.s3 import add_s3_flags
from engram_runtime.engine.config import DEVICES, DTYPES
from engram_runtime.loader.prefetch import prefetch
from engram_runtime.models.spec import STATE_DTYPES


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a checkpoint over an OpenAI-compatible API",
        description="Serve a Hugging Face checkpoint folder. SIGTERM drains: running turns finish, snapshots are "
        "written, the process ends within the drain timeout; a second SIGTERM ends it at once.",
    )
    add_model_flags(parser)
    add_server_flags(parser.add_argument_group("server"))
    add_admin_flags(parser)
    add_snapshot_flags(parser.add_argument_group("snapshots"))
    parser.set_defaults(func=run)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The engine's flags; also those of `batch` and `chat`."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        required=parser.prog.endswith(("serve", "batch")),
        help="checkpoint folder, as published on Hugging Face",
    )
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and KV; auto: the checkpoint's on a GPU, float32 on a CPU (default: auto)",
    )
    group.add_argument(
        "--state-dtype",
        choices=STATE_DTYPES,
        default="float32",
        help="of the recurrent state of hybrid models; bfloat16: half the bytes to move and to store, but states are "
        "rounded (default: float32)",
    )
    group.add_argument("--device", choices=DEVICES, default="auto", help="default: auto, a GPU when there is one")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest prompt plus output (default: the checkpoint's window, as far as memory allows)",
    )
    group.add_argument(
        "--max-num-seqs", type=int, default=64, metavar="N", help="sequences in the running batch (default: 64)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="TOKENS",
        help="tokens computed in one step (default: 2048)",
    )
    group.add_argument(
        "--kv-cache-tokens", type=int, metavar="TOKENS", help="size of the KV pool (default: from the memory)"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of the card that weights, steps and caches take together (default: 0.9; GPUs only)",
    )
    group.add_argument(
        "--decode-steps-per-launch",
        type=int,
        default=1,
        metavar="N",
        help="decode steps launched as one while nobody waits; a request that comes meanwhile waits for them "
        "(default: 1; GPUs, models without recurrent state)",
    )
    group.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs per replica (default: 1)")
    group.add_argument("--seed", type=int, help="makes requests without a seed reproducible")
    group.add_argument(
        "--op",
        type=override,
        action="append",
        default=[],
        metavar="OP=BACKEND",
        help="force an op's implementation; may be given again; see `engram ops`",
    )


def add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: the folder's name)")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    group.add_argument("--port", type=int, default=8000, help="OpenAI and snapshot calls (default: 8000)")
    group.add_argument("--admin-port", type=int, default=8001, help="metrics, drain, status (default: 8001)")
    group.add_argument(
        "--api-keys-dir",
        type=Path,
        metavar="DIR",
        help="one file per tenant, one key a line; read again when it changes",
    )
    group.add_argument(
        "--max-queue", type=int, default=256, metavar="N", help="sequences that may wait; more get 429 (default: 256)"
    )
    group.add_argument(
        "--max-body-size", type=size, default="32Mi", metavar="SIZE", help="of a request (default: 32Mi)"
    )
    group.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="from SIGTERM to exit (default: 30)"
    )


def add_snapshot_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--snapshots-disabled", action="store_true", help="remember turns in GPU memory only")
    group.add_argument(
        "--snapshot-host-memory", type=size, default="1Gi", metavar="SIZE", help="host tier (default: 1Gi)"
    )
    group.add_argument("--snapshot-disk-path", type=Path, metavar="DIR", help="folder of the disk tier (default: none)")
    group.add_argument(
        "--snapshot-disk", type=size, default="20Gi", metavar="SIZE", help="budget of the disk tier (default: 20Gi)"
    )
    group.add_argument(
        "--snapshot-store",
        metavar="URI",
        help="durable store: file:///absolute/path or s3://BUCKET[/PREFIX] (default: none)",
    )
    add_s3_flags(group)
    group.add_argument(
        "--tenant-key-file",
        type=Path,
        metavar="FILE",
        help="secret that scopes and signs snapshots; losing it loses them "
        "(default: made once in $XDG_STATE_HOME/engram)",
    )
    group.add_argument(
        "--snapshot-trigger-turn-end",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write each turn to the durable tiers when it ends (default: yes)",
    )
    group.add_argument(
        "--snapshot-idle-seconds",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="write a conversation's newest turn after this long without a request (default: 0, never)",
    )
    group.add_argument(
        "--snapshot-drain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write what is only in memory when the server is told to stop (default: yes)",
    )
    group.add_argument(
        "--snapshot-min-interval-seconds",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="write a conversation at most this often (default: 0)",
    )
    add_retention_flags(group)
    group.add_argument(
        "--gc-interval-seconds",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="between two sweeps; 0: no sweeps, nothing is deleted (default: 3600)",
    )
    group.add_argument(
        "--gc-grace-seconds",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="younger files are never swept: longer than writing a snapshot may take, the same for all who use a store "
        "(default: 3600)",
    )
    group.add_argument(
        "--unsafe-skip-snapshot-checks",
        action="store_true",
        help="for tests that tamper with stored bytes: restore them unchecked",
    )


def add_retention_flags(group: argparse._ArgumentGroup) -> None:
    """What a sweep keeps; also those of `snapshots sweep`."""
    group.add_argument(
        "--retention-keep-last",
        type=int,
        default=1,
        metavar="TURNS",
        help="newest turns kept per conversation and branch (default: 1)",
    )
    group.add_argument(
        "--retention-max-age",
        type=seconds,
        default="30d",
        metavar="TIME",
        help="older conversations are deleted; 0: never (default: 30d)",
    )
    group.add_argument("--retention-max-conversations", type=int, metavar="N", help="default: no limit")
    group.add_argument("--retention-max-total-size", type=size, metavar="SIZE", help="default: no limit")


def run(options: argparse.Namespace) -> int:
    prefetch(options.model)
    return int(load("engram_runtime.cli.serving:run", command="serve")(options))
