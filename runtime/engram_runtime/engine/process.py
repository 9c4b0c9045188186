"""Settings of the interpreter for a process that serves: what a request must not wait for."""

from __future__ import annotations

import gc
import sys

SWITCH_SECONDS = 0.0005
"""Threads that save and restore give way to the engine's after this long; Python's own 5 ms are a decode step."""


def settle() -> None:
    """Call once, when everything is loaded. Affects the whole process, so libraries do not do it by themselves.

    What is alive now stays alive: without this, full collections look at the half million objects of torch and
    transformers each time, 130 ms in the middle of somebody's answer.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
