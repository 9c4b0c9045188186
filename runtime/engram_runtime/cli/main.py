"""`engram`: finds its subcommands and runs one. Nothing heavy is imported before a command really runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.metadata import version as installed_version
from typing import Any

from engram_runtime.cli import activator, autotune, batch, chat, fetch, ops, serve, snapshots
from engram_runtime.cli.lazy import CommandError, missing_extra

GROUP = "engram.commands"
BUILT_IN = (serve, chat, batch, snapshots, ops, autotune, fetch, activator)
# Fields whose flag is not their own name.
FLAGS = {
    "store_uri": "--snapshot-store",
    "host_bytes": "--snapshot-host-memory",
    "disk_bytes": "--snapshot-disk",
    "disk_path": "--snapshot-disk-path",
    "keep_last": "--retention-keep-last",
    "max_age_seconds": "--retention-max-age",
    "max_conversations": "--retention-max-conversations",
    "max_total_bytes": "--retention-max-total-size",
    "op_overrides": "--op",
    "max_body_bytes": "--max-body-size",
    "max_held_bytes": "--max-held-size",
    "poll_seconds": "--poll-interval",
    "save_idle_seconds": "--snapshot-idle-seconds",
    "save_min_interval_seconds": "--snapshot-min-interval-seconds",
}
# Which extra brings the command of another package.
EXTRAS = {"up": "operator"}


def build_parser(plugins: Sequence[EntryPoint] | None = None) -> argparse.ArgumentParser:
    """The whole command line. `plugins` defaults to the installed entry points of the group "engram.commands"."""
    parser = argparse.ArgumentParser(
        prog="engram",
        description="Stateful LLM inference: every turn of a conversation leaves a snapshot, the next turn computes "
        "only new tokens.",
    )
    parser.add_argument("--version", action="version", version=f"engram {installed_version('engram-platform')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in BUILT_IN:
        module.register(commands)
    for plugin in sorted(entry_points(group=GROUP) if plugins is None else plugins, key=lambda item: item.name):
        _register(plugin, commands)
    return parser


def _register(plugin: EntryPoint, commands: Any) -> None:
    try:
        register = plugin.load()
    except ModuleNotFoundError as error:
        # The command exists, its extra is not installed: say so when it is called, not before.
        problem = missing_extra(plugin.name, EXTRAS.get(plugin.name, "dev"), error)
        # No prefix character, so that whatever the command would have taken is taken.
        stub = commands.add_parser(plugin.name, help=f"not installed: {problem}", add_help=False, prefix_chars="\0")
        stub.add_argument("rest", nargs="*")
        stub.set_defaults(func=_fail, problem=problem)
        return
    register(commands)


def _fail(options: argparse.Namespace) -> int:
    problem: CommandError = options.problem
    raise problem


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. 1 with one line on stderr for what the user can mend, 130 for Ctrl+C."""
    if os.getpid() == 1:
        # The first process of a container has no default action for a signal: until a command handles SIGTERM itself,
        # a download could only be killed, after the pod's whole grace period.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    try:
        # The commands of other packages are imported here, so it takes long enough to be interrupted.
        options = build_parser().parse_args(argv)
        return int(options.func(options))
    except CommandError as error:
        print(f"engram: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"engram: {_as_flag(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `engram snapshots ls | head`
        sys.stderr.close()
        return 0


def _as_flag(message: str) -> str:
    """Errors name a field first ("max_model_len must be ..."); on a command line its name is a flag."""
    word, space, rest = message.partition(" ")
    flag = FLAGS.get(word, f"--{word.replace('_', '-')}")
    return flag + space + rest if word.isidentifier() and "_" in word else message
