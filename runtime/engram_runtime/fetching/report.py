"""Says how far a download is: to the log, and to the container's termination message, which outlives the log's tail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LONGEST_MESSAGE = 4000  # the kubelet keeps 4096 bytes


def size_text(count: float) -> str:
    """1610612736 -> "1.5Gi"."""
    for unit in ("", "Ki", "Mi", "Gi"):
        if count < 1024:
            return f"{count:.0f}{unit}" if not unit else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}Ti"


class Report:
    """Thread-safe. `termination_log` is written only where it exists."""

    def __init__(
        self,
        say: Callable[[str], None],
        termination_log: Path | None = None,
        *,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._termination_log = termination_log
        self._every = every_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0
        self._moved = 0
        self._began = clock()
        self._spoke = clock()

    def say(self, line: str) -> None:
        self._say(line)
        self.note(line)

    def note(self, line: str) -> None:
        """To the termination message only."""
        path = self._termination_log
        if path is not None and path.exists():
            with suppress(OSError):  # a volume of somebody else's: the log has it
                path.write_text(line[:LONGEST_MESSAGE] + "\n", encoding="utf-8")

    def begin(self, total: int, done: int) -> None:
        """`done` of `total` bytes are there from an earlier try."""
        with self._lock:
            self._total, self._done, self._moved = total, done, 0
            self._began = self._spoke = self._clock()

    def moved(self, count: int) -> None:
        """Bytes came in; negative for bytes that have to come again."""
        with self._lock:
            self._done += count
            self._moved += max(count, 0)
            now = self._clock()
            if now - self._spoke < self._every:
                return
            self._spoke = now
            rate = self._moved / max(now - self._began, 1e-3)
            left = (self._total - self._done) / rate if rate else 0.0
            share = 100 * self._done / max(self._total, 1)
            line = (
                f"{size_text(self._done)} of {size_text(self._total)} ({share:.0f} %), {size_text(rate)}/s, "
                f"about {left:.0f} s left"
            )
        self.say(line)

    @property
    def moved_bytes(self) -> int:
        with self._lock:
            return self._moved
