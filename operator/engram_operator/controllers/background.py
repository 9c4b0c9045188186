"""Calls that take minutes, such as an upload or a sweep: they run beside the work queue, one for each key.

A worker that waited for them would be one worker less for everybody. What they came to is picked up by the next look at
their key, for which they ask when they end. They end with the process, and whoever starts them can start them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

AT_ONCE = 16


class Background(Generic[Key, Result]):
    """`ended(key)` is called when a result is there to be taken."""

    def __init__(self, ended: Callable[[Key], None], at_once: int = AT_ONCE) -> None:
        self._ended = ended
        self._turns = asyncio.Semaphore(at_once)
        self._tasks: dict[Key, asyncio.Task[Result]] = {}

    def start(self, key: Key, work: Coroutine[Any, Any, Result]) -> None:
        """ValueError while another of this key runs or waits to be taken."""
        if key in self._tasks:
            work.close()
            raise ValueError(f"key {key} has work that was not taken yet")
        task = self._tasks[key] = asyncio.create_task(self._run(work), name="background")
        task.add_done_callback(lambda done: None if done.cancelled() else self._ended(key))

    def runs(self, key: Key) -> bool:
        task = self._tasks.get(key)
        return task is not None and not task.done()

    def ended(self, key: Key) -> bool:
        """Whether there is something to take."""
        task = self._tasks.get(key)
        return task is not None and task.done()

    def take(self, key: Key) -> Result | None:
        """What it came to, once; raises what it raised. None: nothing runs for this key, or it has not ended."""
        task = self._tasks.get(key)
        if task is None or not task.done():
            return None
        del self._tasks[key]
        return task.result()

    async def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        async with self._turns:
            return await work
