"""Line editing in `engram chat`, where Python was built with it."""

from __future__ import annotations

import contextlib
import importlib


def enable() -> None:
    """Importing readline is what switches `input` over."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")
