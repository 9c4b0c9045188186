"""Reference-counted slots: the one mechanism behind KV blocks and recurrent-state slots.

A slot is *free* (nobody holds it, nothing in it is wanted), *held* (reference count above 0) or *cached* (nobody holds
it, but the prefix index can still find its contents). Cached slots are what a new allocation evicts, least recently
released first; so freeing is cheap and forgetting is lazy.

A long conversation has thousands of blocks, and all of them change hands before its first token: so whole arrays are
counted at once, and the order of eviction is a queue whose entries are checked when their turn comes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

import numpy as np

FEW = 16
"""Up to here a loop is faster than numpy; a longer sequence must not name a slot twice."""
SLACK = 4096
"""Entries of the eviction queue that have lapsed before it is swept, beside one for every slot."""


def as_slots(slots: Sequence[int]) -> array[int]:
    """As array("i"); itself if it is one."""
    return slots if isinstance(slots, array) else array("i", slots)


def slots_view(slots: Sequence[int]) -> np.ndarray:
    """[n] int32, sharing memory; let it go before the array is made longer or shorter."""
    return np.frombuffer(as_slots(slots), dtype=np.int32)


class Pool:
    """`size` slots numbered from 0. Not thread-safe: the engine thread owns it.

    `on_evict(slots)` is called with cached slots that are about to be reused, the next one first; it drops every way to
    find the first few of them (at least one), returns how many, and may call `uncache` for others.
    """

    def __init__(self, size: int, on_evict: Callable[[array[int]], int] | None = None) -> None:
        self._size = size
        self._on_evict = on_evict
        # Each as an array for single slots and as a view of it for many.
        self._references, self._indexed = array("i", bytes(4 * size)), bytearray(size)
        self._stamps = array("q", bytes(8 * size))
        """Of cached slots: which entry of the queue is theirs. 0: not cached."""
        self._all_references = np.frombuffer(self._references, dtype=np.int32)
        self._all_indexed = np.frombuffer(self._indexed, dtype=np.bool_)
        self._all_stamps = np.frombuffer(self._stamps, dtype=np.int64)
        self._free = array("i", range(size))
        self._free_head = 0
        self._queue = array("i")
        """Cached slots in the order of their release: entry i has stamp `_first_stamp` + i, and has lapsed if its slot
        has another one."""
        self._head = 0
        self._first_stamp = 1
        self._demoted: list[tuple[int, int]] = []
        """(slot, negative stamp): before the queue, the last one first."""
        self._lowest = 0
        self._cached = 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def available(self) -> int:
        """Slots an allocation could get now."""
        return len(self._free) - self._free_head + self._cached

    @property
    def cached(self) -> int:
        return self._cached

    @property
    def held(self) -> int:
        return self._size - self.available

    def references(self, slot: int) -> int:
        return self._references[slot]

    def allocate(self, count: int) -> array[int] | None:
        """`count` slots with one reference each, or None (and nothing changed) when there are not enough."""
        if count > self.available:
            return None
        self._evict(count)
        head = self._free_head
        slots = self._free[head : head + count]
        self._free_head = head + count
        if self._free_head > self._size:
            del self._free[: self._free_head]
            self._free_head = 0
        if count <= FEW:
            for slot in slots:
                self._references[slot] = 1
        else:
            self._all_references[slots_view(slots)] = 1
        return slots

    def _evict(self, wanted: int) -> None:
        """Until `wanted` slots are free."""
        window = FEW
        while (missing := wanted - (len(self._free) - self._free_head)) > 0:
            oldest = self._oldest(min(missing, window))
            taken = len(oldest) if self._on_evict is None else self._on_evict(oldest)
            self.uncache(oldest[:taken])
            window = max(FEW, 4 * taken)

    def _oldest(self, most: int) -> array[int]:
        """The next slots to evict, at least one: as many as lie side by side in the queue."""
        while self._demoted:
            slot, stamp = self._demoted.pop()
            if self._stamps[slot] == stamp:
                return array("i", (slot,))
        while self._stamps[self._queue[self._head]] != self._first_stamp + self._head:
            self._head += 1
        head = self._head
        if most == 1:
            return self._queue[head : head + 1]
        entries = self._queue[head : head + most]
        stamps = self._all_stamps[slots_view(entries)]
        lapsed = stamps != np.arange(self._first_stamp + head, self._first_stamp + head + len(entries))
        first = int(lapsed.argmax())
        return entries[:first] if lapsed[first] else entries

    def acquire(self, slots: Sequence[int]) -> None:
        """One more reference for each: the slots stay until it is released."""
        if len(slots) <= FEW:
            for slot in slots:
                if self._references[slot] == 0:
                    if not self._stamps[slot]:
                        raise RuntimeError(f"slot {slot} is free: its contents are gone")
                    self._stamps[slot] = 0
                    self._cached -= 1
                self._references[slot] += 1
            return
        chosen = slots_view(slots)
        counts = self._all_references[chosen]
        unheld = chosen[counts == 0]
        if unheld.size:
            free = unheld[self._all_stamps[unheld] == 0]
            if free.size:
                raise RuntimeError(f"slot {free[0]} is free: its contents are gone")
            self._all_stamps[unheld] = 0
            self._cached -= unheld.size
        self._all_references[chosen] = counts + 1

    def release(self, slots: Sequence[int]) -> None:
        """Give up one reference each. Pass a chain last block first: the tail goes before the head."""
        if len(slots) <= FEW:
            for slot in slots:
                count = self._references[slot]
                if count == 0:
                    raise RuntimeError(f"slot {slot} was released more often than it was acquired")
                self._references[slot] = count - 1
                if count == 1:
                    if self._indexed[slot]:
                        self._stamps[slot] = self._first_stamp + len(self._queue)
                        self._queue.append(slot)
                        self._cached += 1
                    else:
                        self._free.append(slot)
        else:
            self._release_many(slots_view(slots))
        if len(self._queue) > 2 * self._size + SLACK:
            self._sweep()

    def _release_many(self, chosen: np.ndarray) -> None:
        counts = self._all_references[chosen]
        if not counts.all():
            slot = chosen[counts == 0][0]
            raise RuntimeError(f"slot {slot} was released more often than it was acquired")
        self._all_references[chosen] = counts - 1
        unheld = chosen[counts == 1]
        found = self._all_indexed[unheld]
        self._free.frombytes(unheld[~found].tobytes())
        cached = unheld[found]
        stamp = self._first_stamp + len(self._queue)
        self._all_stamps[cached] = np.arange(stamp, stamp + cached.size)
        self._queue.frombytes(cached.tobytes())
        self._cached += cached.size

    def _sweep(self) -> None:
        """Leave out of the queue what has lapsed or was evicted."""
        entries = slots_view(self._queue[self._head :])
        stamps = np.arange(self._first_stamp + self._head, self._first_stamp + len(self._queue))
        kept = entries[self._all_stamps[entries] == stamps]
        self._first_stamp += len(self._queue)
        self._all_stamps[kept] = np.arange(self._first_stamp, self._first_stamp + kept.size)
        self._queue = array("i", kept.tobytes())
        self._head = 0

    def demote(self, slot: int) -> None:
        """Evict this slot before all others, if it is cached now."""
        if self._stamps[slot]:
            self._lowest -= 1
            self._stamps[slot] = self._lowest
            self._demoted.append((slot, self._lowest))
            if len(self._demoted) > self._size + SLACK:
                self._demoted = [(slot, stamp) for slot, stamp in self._demoted if self._stamps[slot] == stamp]

    def cache(self, slots: Sequence[int]) -> None:
        """The index can find these slots from now on: keep their contents after the last release."""
        if len(slots) <= FEW:
            for slot in slots:
                self._indexed[slot] = True
        else:
            self._all_indexed[slots_view(slots)] = True

    def uncache(self, slots: Sequence[int]) -> None:
        """The index no longer finds these slots."""
        if len(slots) <= FEW:
            for slot in slots:
                self._indexed[slot] = False
                if self._stamps[slot]:
                    self._stamps[slot] = 0
                    self._free.append(slot)
                    self._cached -= 1
            return
        chosen = slots_view(slots)
        self._all_indexed[chosen] = False
        cached = chosen[self._all_stamps[chosen] != 0]
        self._all_stamps[cached] = 0
        self._free.frombytes(cached.tobytes())
        self._cached -= cached.size

    def check(self, holders: Mapping[int, int]) -> None:
        """Raise AssertionError unless every slot is in exactly one state and `holders` explains every reference."""
        free_list = self._free[self._free_head :]
        free = set(free_list)
        assert len(free) == len(free_list), "a slot is on the free list twice"
        queued = {slot: self._first_stamp + i for i, slot in enumerate(self._queue) if i >= self._head}
        queued |= {slot: stamp for slot, stamp in self._demoted if self._stamps[slot] == stamp}
        assert self._cached == sum(stamp != 0 for stamp in self._stamps), "cached slots are miscounted"
        for slot in range(self._size):
            expected, cached = holders.get(slot, 0), self._stamps[slot] != 0
            assert self._references[slot] == expected, (
                f"slot {slot} has {self._references[slot]} references, its holders account for {expected}"
            )
            places = (expected > 0) + (slot in free) + cached
            assert places == 1, f"slot {slot} is in {places} of held, free, cached"
            assert not cached or queued.get(slot) == self._stamps[slot], f"slot {slot} is cached but not in the queue"
            assert (slot in free) <= (not self._indexed[slot]), f"slot {slot} is free but still indexed"
