"""How the last saves ended: the first thing to know when memory is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from engram_runtime.snapshots.views import SaveOutcomes

LONGEST_ERROR = 500


class OutcomeLog:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._now = SaveOutcomes()

    def succeeded(self) -> None:
        """A snapshot is on every durable tier."""
        with self._lock:
            self._now = replace(self._now, last_success_time=self._clock())

    def failed(self, error: str) -> None:
        """A snapshot is missing from a tier, or was dropped."""
        with self._lock:
            self._now = replace(self._now, last_failure_time=self._clock(), last_error=error[:LONGEST_ERROR])

    def read(self) -> SaveOutcomes:
        with self._lock:
            return self._now
