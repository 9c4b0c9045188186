"""Measures how long the product took, whatever else the machine was doing meanwhile.

A thread beside the measured code sleeps in small steps. How much longer a step took than it should have is time in
which this process could not run; it is taken off. On an idle machine that is next to nothing and an upper bound means
what it says; on a crowded one a bound is never missed because others had the processor.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

STEP = 0.005


class Stopwatch:
    def __enter__(self) -> Self:
        self._late = 0.0
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._ended: float | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = time.monotonic()
        self._stop.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Since the beginning (or from beginning to end), without the time that others took."""
        return self.whole - self.late

    @property
    def whole(self) -> float:
        """As a clock on the wall says."""
        return (self._ended or time.monotonic()) - self._began

    @property
    def late(self) -> float:
        """Seconds in which others had the processor."""
        return self._late

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.is_set():
            time.sleep(STEP)
            now = time.monotonic()
            self._late += max(0.0, now - before - 2 * STEP)
            before = now
