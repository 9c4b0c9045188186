"""The `engram` command."""

from engram_runtime.cli.main import main

__all__ = ["main"]
