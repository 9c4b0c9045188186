"""Reference-counted slots: nothing is lost, nothing is handed out twice, the least recently released goes first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.cache.pool import Pool


def test_allocation_is_all_or_nothing() -> None:
    pool = Pool(3)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) is None
    assert pool.available == 1
    assert pool.allocate(1) == [2]


def test_released_slots_that_the_index_knows_are_evicted_oldest_first() -> None:
    evicted: list[int] = []
    pool = Pool(3, evicted.append)
    slots = pool.allocate(3)
    assert slots is not None
    for slot in slots:
        pool.cache(slot)
    pool.release([1])
    pool.release([0])
    assert pool.cached == 2
    assert pool.allocate(1) == [1]
    assert evicted == [1]


def test_an_acquired_slot_is_not_evicted() -> None:
    pool = Pool(2)
    first, second = pool.allocate(2) or (0, 0)
    pool.cache(first)
    pool.cache(second)
    pool.release([first, second])
    pool.acquire([first])
    assert pool.allocate(1) == [second]
    assert pool.allocate(1) is None


def test_misuse_is_an_error_and_not_a_corruption() -> None:
    pool = Pool(1)
    pool.allocate(1)
    pool.release([0])
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([0])
    with pytest.raises(RuntimeError, match="gone"):
        pool.acquire([0])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "acquire", "release", "cache", "uncache"]), st.integers(0, 7))))
def test_any_sequence_of_operations_keeps_the_books_balanced(operations: list[tuple[str, int]]) -> None:
    indexed: set[int] = set()
    pool = Pool(8, indexed.discard)
    held: Counter[int] = Counter()
    for operation, slot in operations:
        if operation == "allocate":
            taken = pool.allocate(slot)
            assert (taken is None) == (slot > 8 - sum(count > 0 for count in held.values()))
            for new in taken or ():
                assert held[new] == 0
                assert new not in indexed
                held[new] = 1
        elif operation == "release" and held[slot]:
            pool.release([slot])
            held[slot] -= 1
        elif operation == "cache" and held[slot]:
            pool.cache(slot)
            indexed.add(slot)
        elif operation == "uncache" and slot in indexed:
            pool.uncache(slot)
            indexed.discard(slot)
        elif operation == "acquire" and (held[slot] or slot in indexed):
            pool.acquire([slot])
            held[slot] += 1
        pool.check(held)
