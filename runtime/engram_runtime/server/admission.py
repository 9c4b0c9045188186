"""The door: what may enter, given the server's phase and how much is already inside.

The queue is bounded, because a request that will time out before it runs only takes time from those that would not.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from engram_runtime.server.errors import ApiError, invalid

Phase = Literal["loading", "ready", "draining", "failed"]


class Admission:
    """Counts sequences (n > 1 counts n), on one event loop. Phases only move forward."""

    def __init__(self, *, max_running: int, max_queue: int) -> None:
        self._capacity = max_running + max_queue
        self._max_running = max_running
        self._inside = 0
        self._phase: Phase = "loading"
        self._reason = "the model is loading"
        self._empty = asyncio.Event()
        self._empty.set()
        self._active_at = time.monotonic()
        self._finished: deque[tuple[float, int]] = deque(maxlen=64)

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def inside(self) -> int:
        return self._inside

    @property
    def idle_seconds(self) -> float:
        """Since the last request left, or the door opened; 0 while one is inside."""
        return 0.0 if self._inside else time.monotonic() - self._active_at

    def move(self, phase: Phase, reason: str) -> None:
        self._active_at = time.monotonic()
        self._phase, self._reason = phase, reason

    def check_open(self) -> None:
        """ApiError 503 unless new work may enter."""
        if self._phase != "ready":
            retry = 1 if self._phase == "draining" else 5
            raise ApiError(503, f"not serving: {self._reason}", code=self._phase, retry_after=retry)

    @contextmanager
    def enter(self, sequences: int) -> Iterator[None]:
        """Hold a place for `sequences`; 429 when the queue is full, 400 when it could never hold them."""
        self.check_open()
        if sequences > self._capacity:
            raise invalid("n", f"n: {sequences} sequences were asked for, this server holds at most {self._capacity}")
        if self._inside + sequences > self._capacity:
            raise ApiError(
                429,
                f"the queue is full: {self._inside} sequences are running or waiting",
                code="queue_full",
                retry_after=self._wait_estimate(),
            )
        self._inside += sequences
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= sequences
            self._active_at = time.monotonic()
            self._finished.append((time.monotonic(), sequences))
            if self._inside == 0:
                self._empty.set()

    async def wait_empty(self, timeout: float) -> bool:
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def _wait_estimate(self) -> int:
        """Seconds until a place is free, from the rate at which sequences finished lately; 1 to 60."""
        if len(self._finished) < 2:
            return 1
        seconds = time.monotonic() - self._finished[0][0]
        rate = sum(count for _, count in self._finished) / max(seconds, 1e-3)
        waiting = max(self._inside - self._max_running, 1)
        return max(1, min(60, math.ceil(waiting / max(rate, 1e-3))))
