"""The queue's promises: one worker a key, many adds are one look, delays, back-off, an end in time.

All in virtual time: what is due is done before any of it passes, so every pause here is long enough and exact.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from engram_operator.kube import queue as module
from engram_operator.kube.queue import KeyedQueue
from tests.support.loop_time import in_virtual_time

Reconcile = Callable[[str], Awaitable[float | None]]


@contextlib.asynccontextmanager
async def running(queue: KeyedQueue[str], reconcile: Reconcile, workers: int = 4) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(queue.run(reconcile, workers, stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 5)


@in_virtual_time
async def test_adds_while_a_key_is_worked_on_are_one_more_look() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    seen: Counter[str] = Counter()
    inside = asyncio.Event()
    release = asyncio.Event()

    async def reconcile(key: str) -> None:
        seen[key] += 1
        inside.set()
        await release.wait()

    async with running(queue, reconcile):
        for _ in range(10):
            queue.add("a")
        await inside.wait()
        assert seen["a"] == 1
        for _ in range(10):
            queue.add("a")
        await asyncio.sleep(0.02)
        assert seen["a"] == 1  # never two workers at once
        assert queue.depth == 1
        release.set()
        await asyncio.sleep(0.05)
        assert seen["a"] == 2
        assert queue.depth == 0


@in_virtual_time
async def test_a_busy_key_does_not_keep_others_from_being_worked_on() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    done: list[str] = []
    blocked = asyncio.Event()

    async def reconcile(key: str) -> None:
        if key == "slow":
            await blocked.wait()
        done.append(key)

    async with running(queue, reconcile, workers=2):
        queue.add("slow")
        await asyncio.sleep(0.01)
        queue.add("slow")
        for number in range(20):
            queue.add(str(number))
        await asyncio.sleep(0.1)
        assert len(done) == 20
        blocked.set()
        await asyncio.sleep(0.05)
        assert done.count("slow") == 2


@in_virtual_time
async def test_a_delay_is_kept_and_an_earlier_add_wins() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    loop = asyncio.get_running_loop()
    times: dict[str, float] = {}

    async def reconcile(key: str) -> None:
        times[key] = loop.time() - start

    start = loop.time()
    async with running(queue, reconcile):
        queue.add("late", after=0.15)
        queue.add("soon", after=60)
        queue.add("soon", after=0.05)
        queue.add("soon", after=30)
        await asyncio.sleep(0.3)
    assert times == {"soon": pytest.approx(0.05), "late": pytest.approx(0.15)}


@in_virtual_time
async def test_the_returned_seconds_bring_the_key_back() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    seen = 0

    async def reconcile(key: str) -> float | None:
        nonlocal seen
        seen += 1
        return 0.01 if seen < 4 else None

    async with running(queue, reconcile):
        queue.add("a")
        await asyncio.sleep(0.2)
    assert seen == 4


@in_virtual_time
async def test_failures_back_off_up_to_the_cap_and_success_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.005)
    monkeypatch.setattr(module, "SHORTEST_DELAY_S", 0.001)
    monkeypatch.setattr(module, "LAST_DELAY_S", 0.02)
    delays: list[float] = []
    queue: KeyedQueue[str] = KeyedQueue(failed=lambda key, error, delay: delays.append(delay))
    seen = 0

    async def reconcile(key: str) -> None:
        nonlocal seen
        seen += 1
        if seen <= 12:
            raise RuntimeError("no")

    async with running(queue, reconcile):
        queue.add("a")
        await asyncio.sleep(0.5)
        assert queue.backing_off == 0
    assert seen == 13
    assert len(delays) == 12
    assert max(delays) <= 0.02


@in_virtual_time
async def test_a_failed_key_is_looked_at_at_once_when_something_changed() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    seen = 0

    async def reconcile(key: str) -> None:
        nonlocal seen
        seen += 1
        raise RuntimeError("no")

    async with running(queue, reconcile):
        for _ in range(12):
            queue.add("a")
            await asyncio.sleep(0.01)
        assert seen >= 12


@in_virtual_time
async def test_stopping_lets_a_running_reconcile_end_and_starts_no_other() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    ended: list[str] = []
    inside = asyncio.Event()

    async def reconcile(key: str) -> None:
        inside.set()
        await asyncio.sleep(0.05)
        ended.append(key)

    stop = asyncio.Event()
    task = asyncio.create_task(queue.run(reconcile, 1, stop))
    queue.add("a")
    await inside.wait()
    queue.add("b")
    stop.set()
    await asyncio.wait_for(task, 2)
    assert ended == ["a"]


@in_virtual_time
async def test_stopping_cancels_a_reconcile_that_does_not_end() -> None:
    queue: KeyedQueue[str] = KeyedQueue(stop_grace_s=0.05)
    inside = asyncio.Event()

    async def reconcile(key: str) -> None:
        inside.set()
        await asyncio.sleep(3600)

    stop = asyncio.Event()
    task = asyncio.create_task(queue.run(reconcile, 1, stop))
    queue.add("a")
    await inside.wait()
    stop.set()
    await asyncio.wait_for(task, 2)


@in_virtual_time
async def test_depth_and_age_are_of_what_is_due() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    queue.add("later", after=60)
    assert (queue.depth, queue.oldest_s) == (0, 0.0)
    queue.add("now")
    await asyncio.sleep(0.02)
    assert queue.depth == 1
    assert queue.oldest_s == pytest.approx(0.02)
    queue.forget("now")
    assert queue.depth == 0


@in_virtual_time
async def test_five_thousand_keys_are_worked_on_once_each() -> None:
    queue: KeyedQueue[int] = KeyedQueue()
    seen: Counter[int] = Counter()

    async def reconcile(key: int) -> None:
        seen[key] += 1

    stop = asyncio.Event()
    task = asyncio.create_task(queue.run(reconcile, 8, stop))
    for number in range(5000):
        queue.add(number)
        queue.add(number)
    while len(seen) < 5000:
        await asyncio.sleep(0.01)
    stop.set()
    await asyncio.wait_for(task, 5)
    assert set(seen.values()) == {1}
