"""The clock of an event loop in the hand of a test: no pause takes any time, and a deadline ends when the test says so.

A test that gives real milliseconds to something and then asserts that it has happened fails on a busy machine, and one
with real deadlines fails there for the opposite reason. With these, what is late never follows from who had the
processor.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Arguments = ParamSpec("Arguments")


class _NoWaiting(selectors.DefaultSelector):
    """Finds what is ready now; where it would wait for a while, that while is over."""

    def __init__(self, passed: Callable[[float], None]) -> None:
        super().__init__()
        self._passed = passed

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self._passed(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can be done, and then is at once that of the next timer.

    For code that waits for timers only: whoever waits for a thread or another process would see hours pass.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_NoWaiting(self._pass))

    def time(self) -> float:
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += seconds


def in_virtual_time(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """Run a test on a `VirtualLoop` of its own."""

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


class LoopTime:
    """The clock of the loop that runs now: real, and put forward by `skip`. For tests with sockets.

    Deadlines are then long ones, which no stall uses up, and end because the test skips them.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._real = loop.time
        self._skipped = 0.0
        loop.time = self._now  # type: ignore[method-assign]

    def _now(self) -> float:
        return self._real() + self._skipped

    def skip(self, seconds: float) -> None:
        """From the loop's own thread: what waits for no longer than this is due in the loop's next round."""
        self._skipped += seconds
