"""A work queue of keys: coalescing, one worker per key, delays, back-off.

Level-triggered work needs no events, only "look at this one again": ten changes of an object while it is worked on
are one more look. kopf's own queue calls handlers with the event and forgets failures of event handlers.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST_DELAY_S = 0.25
LAST_DELAY_S = 30.0  # client-go goes on to a quarter of an hour; a person who repaired something waits for this
SHORTEST_DELAY_S = 0.02
STOP_GRACE_S = 10.0


@dataclass(slots=True)
class KeyedQueue(Generic[Key]):
    """`failed(key, error, delay_s)` is told of every reconcile that raised, before its back-off."""

    failed: Callable[[Key, Exception, float], None] = lambda key, error, delay_s: None
    stop_grace_s: float = STOP_GRACE_S
    _due: dict[Key, float] = field(default_factory=dict)
    _heap: list[tuple[float, int, Key]] = field(default_factory=list)
    _busy: set[Key] = field(default_factory=set)
    _failures: dict[Key, int] = field(default_factory=dict)
    _turn: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: Key, *, after: float = 0.0) -> None:
        """Look at `key` in `after` seconds, or earlier when that was asked before. Any number of times is once."""
        due = asyncio.get_running_loop().time() + max(0.0, after)
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        self._turn += 1
        heapq.heappush(self._heap, (due, self._turn, key))
        self._wake.set()

    def forget(self, key: Key) -> None:
        """Drop what waits for `key`; a worker that has it goes on."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    @property
    def depth(self) -> int:
        """Keys that could be worked on now and are not."""
        now = asyncio.get_running_loop().time()
        return sum(due <= now for due in self._due.values())

    @property
    def oldest_s(self) -> float:
        """Seconds that the longest waiting due key has waited."""
        now = asyncio.get_running_loop().time()
        return max(0.0, now - min(self._due.values(), default=now))

    @property
    def backing_off(self) -> int:
        """Keys whose last reconcile failed."""
        return len(self._failures)

    async def run(self, reconcile: Callable[[Key], Awaitable[float | None]], workers: int, stop: asyncio.Event) -> None:
        """Work until `stop` is set; then running reconciles may end, within `stop_grace_s`.

        `reconcile` returns the seconds after which to look again, None for no need.
        """
        tasks = [asyncio.create_task(self._work(reconcile, stop)) for _ in range(workers)]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            self._wake.set()
            if not stop.is_set():  # a worker never ends by itself: its error is ours
                for task in done:
                    if not task.cancelled():
                        task.result()
                raise RuntimeError("a worker was cancelled")
            await asyncio.wait(tasks, timeout=self.stop_grace_s)
        finally:
            for task in [*tasks, stopping]:
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)

    async def _work(self, reconcile: Callable[[Key], Awaitable[float | None]], stop: asyncio.Event) -> None:
        while (key := await self._take(stop)) is not None:
            try:
                again = await reconcile(key)
            except Exception as error:
                failures = self._failures[key] = self._failures.get(key, 0) + 1
                ceiling = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures, 16))
                delay = max(SHORTEST_DELAY_S, random.uniform(0.0, ceiling))
                self.failed(key, error, delay)
                self.add(key, after=delay)
            else:
                self._failures.pop(key, None)
                if again is not None:
                    self.add(key, after=again)
            finally:
                self._busy.discard(key)
                self._wake.set()

    async def _take(self, stop: asyncio.Event) -> Key | None:
        """The key that is due longest and that no worker has; None when stopping."""
        loop = asyncio.get_running_loop()
        while not stop.is_set():
            held: list[tuple[float, int, Key]] = []
            found: Key | None = None
            wait: float | None = None
            while self._heap:
                entry = self._heap[0]
                due, _, key = entry
                if self._due.get(key) != due:  # taken, forgotten, or asked for earlier
                    heapq.heappop(self._heap)
                elif due > loop.time():
                    wait = due - loop.time()
                    break
                elif key in self._busy:
                    held.append(heapq.heappop(self._heap))
                else:
                    heapq.heappop(self._heap)
                    found = key
                    break
            for entry in held:
                heapq.heappush(self._heap, entry)
            if found is not None:
                del self._due[found]
                self._busy.add(found)
                return found
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), wait)
            except TimeoutError:
                continue
        return None
