"""Heavy modules on demand: `engram --help` must not load torch, and a missing extra must say what to install."""

from __future__ import annotations

import importlib
from typing import Any


class CommandError(Exception):
    """What a command tells the user before it ends with exit code 1: one line, no traceback."""


def missing_extra(command: str, extra: str, error: ModuleNotFoundError) -> CommandError:
    return CommandError(f"engram {command} needs the package {error.name!r}: pip install 'engram-platform[{extra}]'")


def load(target: str, *, command: str, extra: str = "runtime") -> Any:
    """The object at "module:name". CommandError naming the `pip install` when a package it needs is missing."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0].startswith("engram_"):
            raise
        raise missing_extra(command, extra, error) from error
