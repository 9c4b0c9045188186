"""Heads without conditional writes: one winner, whatever the interleaving, and nothing overwritten.

The store here is a dictionary that only knows unconditional requests; a scheduler may run another writer before any
of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.clock import Clock
from engram_runtime.snapshots.io.s3 import heads as module
from engram_runtime.snapshots.io.s3.heads import AppendOnlyHeads
from engram_runtime.snapshots.io.store import ObjectInfo, StoreUnavailable
from tests.support.virtual_clock import VirtualClock

KEY = "v1/ref/a"
OTHER = "v1/ref/b"


class Memory:
    """`turn` is called before each request with its name and key: to stop, to interleave, to crash."""

    def __init__(self, turn: Callable[[str, str], None] = lambda request, key: None) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.overwritten: list[str] = []
        self.clock = 1000.0
        self.turn = turn
        self.lock = threading.Lock()

    def plain_put(self, key: str, data: bytes, within_seconds: float | None = None) -> None:
        self.turn("put", key)
        with self.lock:
            if key in self.objects:
                self.overwritten.append(key)
            self.objects[key] = (data, self.clock)

    def plain_get(self, key: str) -> bytes:
        self.turn("get", key)
        with self.lock:
            if key not in self.objects:
                raise NotFound(key)
            return self.objects[key][0]

    def plain_list(self, prefix: str, after: str | None, limit: int) -> list[ObjectInfo]:
        self.turn("list", prefix)
        with self.lock:
            keys = sorted(key for key in self.objects if key.startswith(prefix) and (after is None or key > after))
            return [ObjectInfo(key, len(self.objects[key][0]), self.objects[key][1]) for key in keys[:limit]]

    def remove_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.turn("remove", key)
            with self.lock:
                self.objects.pop(key, None)


def heads(memory: Memory, clock: Clock | None = None) -> AppendOnlyHeads:
    return AppendOnlyHeads(memory, lambda key: key in (KEY, OTHER), clock)


def put_entry(memory: Memory, generation: int, writer: str, data: bytes, modified: float) -> str:
    name = f"{generation:016x}{writer * 32}"
    memory.objects[f"{KEY}/{name}"] = (data, modified)
    return name


@settings(max_examples=30)
@given(order=st.lists(st.integers(0, 2), max_size=60))
def test_one_swap_wins_in_every_order_of_requests(order: list[int]) -> None:
    """Three writers swap from one tag; `order` says who makes the next request."""
    memory = Memory()
    tag = heads(memory).compare_and_swap(KEY, b"start", None)
    condition = threading.Condition()
    pending = list(order)
    waiting: set[int] = set()
    running = {0, 1, 2}
    me = threading.local()

    def turn(request: str, key: str) -> None:
        number = getattr(me, "number", None)
        if number is None:
            return
        with condition:
            waiting.add(number)
            condition.notify_all()
            # In order while the list lasts; one who sleeps between requests is passed over.
            condition.wait_for(lambda: not pending or pending[0] == number or pending[0] not in waiting, timeout=1)
            if (pending and pending[0] == number) or (pending and pending[0] not in running):
                pending.pop(0)
            waiting.discard(number)
            condition.notify_all()

    memory.turn = turn
    won: dict[int, str] = {}

    def write(number: int) -> None:
        me.number = number
        try:
            won[number] = heads(memory).compare_and_swap(KEY, f"by {number}".encode(), tag)
        except Conflict:
            pass
        finally:
            with condition:
                running.discard(number)
                condition.notify_all()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    memory.turn = lambda request, key: None
    ((number, result),) = won.items()
    assert heads(memory).get_tagged(KEY) == (f"by {number}".encode(), result)
    assert memory.overwritten == []
    assert list(memory.objects) == [f"{KEY}/{result}"]


def test_a_dead_writers_claim_expires_by_the_servers_clock() -> None:
    memory = Memory()
    clock = VirtualClock()
    tag = heads(memory).compare_and_swap(KEY, b"start", None)
    dead = f"{KEY}/claim{'0' * 32}"
    memory.objects[dead] = (b"", memory.clock)
    with pytest.raises(StoreUnavailable) as caught:
        heads(memory, clock).compare_and_swap(KEY, b"next", tag)
    assert caught.value.reason == "Contended"
    assert clock.monotonic() > module.ACQUIRE_SECONDS
    memory.clock += module.LEASE_SECONDS + 1
    new = heads(memory).compare_and_swap(KEY, b"next", tag)
    assert heads(memory).get_tagged(KEY) == (b"next", new)
    assert dead not in memory.objects


@pytest.mark.parametrize("request_name", ["put", "list", "get", "remove"])
@pytest.mark.parametrize("skip", range(5))
def test_a_writer_that_dies_at_any_request_leaves_a_whole_head(request_name: str, skip: int) -> None:
    memory = Memory()
    before = heads(memory).compare_and_swap(KEY, b"before", None)
    left = skip

    class Died(BaseException):
        pass

    dead = False

    def turn(request: str, key: str) -> None:
        nonlocal left, dead
        if dead:
            raise Died
        if request == request_name:
            if left == 0:
                dead = True
                raise Died
            left -= 1

    memory.turn = turn
    with suppress(Died):
        heads(memory).compare_and_swap(KEY, b"after", before)
    memory.turn = lambda request, key: None
    data, tag = heads(memory).get_tagged(KEY)
    assert data in (b"before", b"after")
    memory.clock += module.LEASE_SECONDS + 1
    new = heads(memory).compare_and_swap(KEY, b"goes on", tag)
    assert heads(memory).get_tagged(KEY) == (b"goes on", new)
    assert [info.key for info in heads(memory).listing("v1/", None, 10)] == [KEY]


def test_two_entries_of_one_generation_are_read_alike_and_kept() -> None:
    """A request that was stuck for longer than a lease: the older one stays the head, whatever the names say."""
    memory = Memory()
    put_entry(memory, 4, "f", b"base", 900)
    late = put_entry(memory, 5, "a", b"late", 1000)
    first = put_entry(memory, 5, "b", b"first", 990)
    assert heads(memory).get_tagged(KEY) == (b"first", first)
    with pytest.raises(Conflict):
        heads(memory).compare_and_swap(KEY, b"x", late)
    new = heads(memory).compare_and_swap(KEY, b"next", first)
    assert heads(memory).get_tagged(KEY) == (b"next", new)


def test_registers_are_listed_as_one_object_each() -> None:
    memory = Memory()
    put_entry(memory, 1, "a", b"old", 10)
    put_entry(memory, 2, "b", b"newer", 20)
    memory.objects[f"{KEY}/claim{'0' * 32}"] = (b"", 30)
    memory.objects[f"{OTHER}/claim{'0' * 32}"] = (b"", 30)
    memory.objects["v1/ref"] = (b"x", 5)
    memory.objects["v1/z"] = (b"zz", 5)
    expected = [ObjectInfo("v1/ref", 1, 5), ObjectInfo(KEY, 5, 20), ObjectInfo("v1/z", 2, 5)]
    assert heads(memory).listing("v1/", None, 10) == expected
    assert heads(memory).listing("v1/", None, 2) == expected[:2]
    assert heads(memory).listing("v1/", "v1/ref", 10) == expected[1:]
    assert heads(memory).listing("v1/", KEY, 10) == expected[2:]
    assert heads(memory).head(KEY) == ObjectInfo(KEY, 5, 20)
    with pytest.raises(NotFound):
        heads(memory).head(OTHER)


def test_long_logs_are_read_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 3)
    memory = Memory()
    names = [put_entry(memory, generation, "a", str(generation).encode(), 1) for generation in range(1, 11)]
    memory.objects["v1/z"] = (b"z", 5)
    assert heads(memory).get_tagged(KEY) == (b"10", names[-1])
    assert [info.key for info in heads(memory).listing("v1/", None, 10)] == [KEY, "v1/z"]
    heads(memory).delete(KEY)
    assert list(memory.objects) == ["v1/z"]


def test_touching_makes_the_head_new() -> None:
    memory = Memory()
    tag = heads(memory).compare_and_swap(KEY, b"head", None)
    memory.clock += 100
    heads(memory).touch(KEY)
    assert heads(memory).head(KEY).modified == memory.clock
    assert heads(memory).get_tagged(KEY) == (b"head", tag)
    with pytest.raises(NotFound):
        heads(memory).touch(OTHER)
