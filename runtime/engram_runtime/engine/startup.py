"""How long it took from the start of the process until the first token, and where the time went."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)


def process_age() -> float:
    """Seconds since this process was started, as the kernel counts them; since this module was loaded elsewhere."""
    try:
        ticks = int(Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED


_LOADED = time.monotonic()


class StartUp:
    """Marks of one start, each in seconds since the process began: what was over by then."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """`phase` is over, for the first time."""
        if phase not in self.seconds:
            self.seconds[phase] = process_age()
            if phase == "first_token":
                logger.info("first token %s", self)

    def __str__(self) -> str:
        return ", ".join(f"{phase} after {seconds:.1f} s" for phase, seconds in self.seconds.items())
