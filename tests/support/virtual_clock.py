"""A clock for tests of what is done between pauses, not of the pauses: nothing waits, and nothing is ever late."""

from __future__ import annotations

import threading


class VirtualClock:
    """Time passes by sleeping only, and for each thread by itself: what one of them sleeps makes no other one late.

    So the number of tries within a deadline follows from the pauses, however busy the machine is.
    """

    def __init__(self) -> None:
        self._threads = threading.local()

    def monotonic(self) -> float:
        now: float = getattr(self._threads, "now", 0.0)
        return now

    def sleep(self, seconds: float) -> None:
        self._threads.now = self.monotonic() + seconds
