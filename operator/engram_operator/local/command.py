"""`engram up`: the command line of the local mode, registered with the `engram` command by entry point."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from engram_operator.errors import MissingExtraError, ResourceError
from engram_operator.local.endpoints import EndpointsFile
from engram_operator.local.events import Reporter
from engram_operator.local.plan import Machine
from engram_operator.local.secrets import LocalSecrets, read_dotenv
from engram_operator.local.up import LocalCluster, notices, nvidia_gpus, plan_pods
from engram_operator.resources import Schemas, load_files
from engram_operator.settings import LocalSettings

PORT_BASE = 30000
DESCRIPTION = """\
Run the EngramModel resources of a file as processes of this machine, with the pod specs a cluster would get.

Replica i listens on 127.0.0.1, port-base + i, its admin port 1000 above. Clients find the models through
endpoints.json in the state folder, which the LiteLLM provider reads. Ctrl-C drains; a second one ends at once.
"""
EPILOG = """\
The state folder holds the volumes, those of a pod's own life in pods/, claims in volumes/; and the tenant key.
A Secret's key is a line NAME__KEY=value of the --env-file, the name in capitals with _ for - and . .
"""


def register(subparsers: Any) -> None:
    """Add `up` to the subcommands of `engram` (an argparse subparsers action)."""
    parser = subparsers.add_parser(
        "up",
        help="run EngramModel resources as local processes",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        required=True,
        type=Path,
        metavar="FILE",
        dest="files",
        help="YAML with EngramModel and SnapshotPolicy documents; may be given again",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="state folder (default: $XDG_STATE_HOME/engram, where clients look)",
    )
    parser.add_argument(
        "--port-base", type=_port, default=PORT_BASE, metavar="PORT", help="port of the first replica (default: 30000)"
    )
    parser.add_argument("--env-file", type=Path, metavar="FILE", help="dotenv file with the Secrets of the resources")
    parser.add_argument("--json", action="store_true", help="events as JSON lines on stdout")
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 0 after a drain, 1 when something must be changed first; every problem is a line on stderr."""
    try:
        return _run(options)
    except (ResourceError, MissingExtraError, ValueError, OSError) as error:
        for line in str(error).splitlines():
            print(f"engram up: {line}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    settings = LocalSettings.from_environment()
    state_dir = options.state_dir.absolute() if options.state_dir else settings.state_dir
    resources = load_files(options.files, Schemas.load())
    secrets = LocalSecrets(state_dir, read_dotenv(options.env_file) if options.env_file else {})
    # The programs installed beside this interpreter come first: `engram` is the one of this environment.
    path = f"{Path(sys.executable).parent}:{settings.inherited.get('PATH', '')}".rstrip(":")
    machine = Machine(state_dir, {**settings.inherited, "PATH": path}, secrets)
    pods = plan_pods(resources, machine, options.port_base, nvidia_gpus(settings.inherited))
    emit = Reporter(sys.stdout if options.json else sys.stderr, as_json=options.json)
    for event in notices(resources):
        emit(event)
    if pods:
        asyncio.run(LocalCluster(pods, EndpointsFile(state_dir / "endpoints.json"), emit).run())
    return 0


def _port(text: str) -> int:
    port = int(text)
    if not 1024 <= port <= 64535:
        raise argparse.ArgumentTypeError(f"must be between 1024 and 64535, got {port}")
    return port
