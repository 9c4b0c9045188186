"""Reference-counted slots: nothing is lost, nothing is handed out twice, the least recently released goes first."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.cache.pool import FEW, SLACK, Pool


def test_allocation_is_all_or_nothing() -> None:
    pool = Pool(3)
    assert list(pool.allocate(2) or ()) == [0, 1]
    assert pool.allocate(2) is None
    assert pool.available == 1
    assert list(pool.allocate(1) or ()) == [2]


def test_released_slots_that_the_index_knows_are_evicted_oldest_first() -> None:
    evicted: list[int] = []

    def forget(slots: array[int]) -> int:
        evicted.append(slots[0])
        return 1

    pool = Pool(3, forget)
    slots = pool.allocate(3)
    assert slots is not None
    for slot in slots:
        pool.cache([slot])
    pool.release([1])
    pool.release([0])
    assert pool.cached == 2
    assert list(pool.allocate(1) or ()) == [1]
    assert evicted == [1]


def test_an_acquired_slot_is_not_evicted() -> None:
    pool = Pool(2)
    first, second = pool.allocate(2) or (0, 0)
    pool.cache([first, second])
    pool.release([first, second])
    pool.acquire([first])
    assert list(pool.allocate(1) or ()) == [second]
    assert pool.allocate(1) is None


def test_misuse_is_an_error_and_not_a_corruption() -> None:
    pool = Pool(1)
    pool.allocate(1)
    pool.release([0])
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([0])
    with pytest.raises(RuntimeError, match="gone"):
        pool.acquire([0])


operations = st.lists(
    st.tuples(st.sampled_from(["allocate", "acquire", "release", "cache", "uncache", "demote"]), st.integers(0, 2)),
    max_size=80,
)


@pytest.mark.parametrize("width", [1, FEW + 3])
@given(operations)
def test_any_sequence_of_operations_keeps_the_books_balanced(width: int, operations: list[tuple[str, int]]) -> None:
    """Slots in groups of `width`: one by one, and as many as are counted at once. Beside them, the order in which they
    must be evicted as a plain list."""
    indexed: set[int] = set()
    order: list[int] = []

    def forget(slots: array[int]) -> int:
        left = [slot for slot in order if slot in indexed]  # an allocation may ask several times
        assert left[: len(slots)] == list(slots), "evicted out of order"
        indexed.difference_update(slots[:2])
        return min(2, len(slots))

    groups = 3
    pool = Pool(groups * width, forget)
    held: Counter[int] = Counter()
    taken: list[list[int]] = []
    for operation, number in operations:
        slots = taken[number] if number < len(taken) else []
        cached = all(not held[slot] and slot in indexed for slot in slots)
        if operation == "allocate":
            free = pool.size - sum(count > 0 for count in held.values())
            found = pool.allocate(number * width)
            assert (found is None) == (number * width > free)
            for new in found or ():
                assert not held[new]
                assert new not in indexed
                held[new] = 1
            order = [slot for slot in order if slot in indexed]
            if found:
                taken = [group for group in taken if not set(group) & set(found)] + [list(found)]
        elif operation == "release" and slots and all(held[slot] for slot in slots):
            pool.release(slots[::-1])
            held.subtract(slots)
            order += [slot for slot in slots[::-1] if not held[slot] and slot in indexed]
        elif operation == "cache" and slots and all(held[slot] for slot in slots):
            pool.cache(slots)
            indexed.update(slots)
        elif operation == "uncache" and slots and all(slot in indexed for slot in slots):
            pool.uncache(slots)
            indexed.difference_update(slots)
            order = [slot for slot in order if slot in indexed]
        elif operation == "acquire" and slots and (cached or all(held[slot] for slot in slots)):
            pool.acquire(slots)
            held.update(slots)
            order = [slot for slot in order if slot not in slots]
        elif operation == "demote" and slots and slots[0] in order:
            pool.demote(slots[0])
            order.remove(slots[0])
            order.insert(0, slots[0])
        assert pool.cached == len(order)
        pool.check(held)


def test_a_queue_of_lapsed_entries_is_swept_and_the_order_kept() -> None:
    evicted: list[int] = []

    def forget(slots: array[int]) -> int:
        evicted.append(slots[0])
        return 1

    pool = Pool(4, forget)
    slots = pool.allocate(4) or array("i")
    pool.cache(slots)
    pool.release([3])
    for _ in range(3 * SLACK):
        pool.release([0])
        pool.acquire([0])
    pool.release([2, 0, 1])
    pool.demote(0)
    for _ in range(3 * SLACK):
        pool.demote(1)
    pool.check({})
    pool.allocate(4)
    assert evicted == [1, 0, 3, 2]
