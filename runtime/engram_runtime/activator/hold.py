"""Who waits for which model, and one poller per model that looks whether a pod has become ready."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger("engram.activator")

Ready = Callable[[str], Awaitable[bool]]


class Full(Exception):
    """More would wait than may."""


@dataclass(slots=True)
class _Model:
    waiters: dict[int, float] = field(default_factory=dict)  # number of a request -> when it came
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    poller: asyncio.Task[None] | None = None


class Hold:
    """For one event loop. `ready(name)` asks the model; it may take its time and never raises."""

    def __init__(self, ready: Ready, *, max_waiting: int, max_held_bytes: int, poll_seconds: float) -> None:
        self._ready = ready
        self._max_waiting = max_waiting
        self._max_held_bytes = max_held_bytes
        self._poll_seconds = poll_seconds
        self._models: dict[str, _Model] = {}
        self._numbers = 0
        self.waiting = 0
        self.held_bytes = 0

    @contextmanager
    def place(self, name: str) -> Iterator[asyncio.Event]:
        """A place in the queue of a model, with the event that says that it is ready. Full."""
        if self.waiting >= self._max_waiting:
            raise Full(f"{self.waiting} requests are waiting already")
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model()
            log.info("model %s: a request waits", name)
        self._numbers += 1
        number = self._numbers
        model.waiters[number] = time.monotonic()
        self.waiting += 1
        if model.poller is None:
            model.poller = asyncio.create_task(self._poll(name, model))
        try:
            yield model.ready
        finally:
            self.waiting -= 1
            del model.waiters[number]
            if not model.waiters:
                model.poller.cancel()
                if self._models.get(name) is model:
                    del self._models[name]

    @contextmanager
    def memory(self) -> Iterator[Callable[[int], None]]:
        """A function that takes so many more bytes for a body, or raises Full (a negative number gives some back); all
        are given back at the end."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if count > 0 and self.held_bytes + count > self._max_held_bytes:
                raise Full(f"{self.held_bytes} bytes of bodies are held already")
            self.held_bytes += count
            taken += count

        try:
            yield take
        finally:
            self.held_bytes -= taken

    def report(self) -> dict[str, dict[str, float]]:
        """By model: how many wait, and how long the oldest has."""
        now = time.monotonic()
        return {
            name: {"waiting": len(model.waiters), "oldest_seconds": round(now - min(model.waiters.values()), 3)}
            for name, model in self._models.items()
        }

    async def _poll(self, name: str, model: _Model) -> None:
        started = time.monotonic()
        while not await self._ready(name):
            await asyncio.sleep(self._poll_seconds * random.uniform(0.8, 1.2))
        log.info(
            "model %s: ready after %.1f s, %d requests go on", name, time.monotonic() - started, len(model.waiters)
        )
        # Who comes from now on asks anew: the pod may be gone by then.
        if self._models.get(name) is model:
            del self._models[name]
        model.ready.set()
