"""Reference-counted slots: the one mechanism behind KV blocks and recurrent-state slots.

A slot is *free* (nobody holds it, nothing in it is wanted), *held* (reference count above 0) or *cached* (nobody holds
it, but the prefix index can still find its contents). Cached slots are what a new allocation evicts, least recently
released first; so freeing is cheap and forgetting is lazy.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping


class Pool:
    """`size` slots numbered from 0. Not thread-safe: the engine thread owns it.

    `on_evict(slot)` is called when a cached slot is about to be reused; it must drop every way to find the slot and
    may call `uncache` for others.
    """

    def __init__(self, size: int, on_evict: Callable[[int], None] | None = None) -> None:
        self._size = size
        self._references = [0] * size
        self._indexed = [False] * size
        self._free: deque[int] = deque(range(size))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def size(self) -> int:
        return self._size

    @property
    def available(self) -> int:
        """Slots an allocation could get now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self._size - self.available

    def references(self, slot: int) -> int:
        return self._references[slot]

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots with one reference each, or None (and nothing changed) when there are not enough."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict_oldest()
        slots = [self._free.popleft() for _ in range(count)]
        for slot in slots:
            self._references[slot] = 1
        return slots

    def _evict_oldest(self) -> None:
        slot = next(iter(self._cached))
        if self._on_evict is not None:
            self._on_evict(slot)
        self.uncache(slot)

    def acquire(self, slots: Iterable[int]) -> None:
        """One more reference for each: the slots stay until it is released."""
        references, cached = self._references, self._cached
        for slot in slots:
            if references[slot] == 0:
                if slot not in cached:
                    raise RuntimeError(f"slot {slot} is free: its contents are gone")
                del cached[slot]
            references[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Give up one reference each. Pass a chain last block first: the tail goes before the head."""
        references, cached, indexed = self._references, self._cached, self._indexed
        for slot in slots:
            count = references[slot]
            if count == 0:
                raise RuntimeError(f"slot {slot} was released more often than it was acquired")
            references[slot] = count - 1
            if count == 1:
                if indexed[slot]:
                    cached[slot] = None
                else:
                    self._free.append(slot)

    def demote(self, slot: int) -> None:
        """Evict this slot before all others, if it is cached now."""
        if slot in self._cached:
            self._cached.move_to_end(slot, last=False)

    def cache(self, slot: int) -> None:
        """The index can find this slot from now on: keep its contents after the last release."""
        self._indexed[slot] = True

    def uncache(self, slot: int) -> None:
        """The index no longer finds this slot."""
        self._indexed[slot] = False
        if slot in self._cached:
            del self._cached[slot]
            self._free.append(slot)

    def check(self, holders: Mapping[int, int]) -> None:
        """Raise AssertionError unless every slot is in exactly one state and `holders` explains every reference."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is on the free list twice"
        for slot in range(self._size):
            expected = holders.get(slot, 0)
            assert self._references[slot] == expected, (
                f"slot {slot} has {self._references[slot]} references, its holders account for {expected}"
            )
            places = (expected > 0) + (slot in free) + (slot in self._cached)
            assert places == 1, f"slot {slot} is in {places} of held, free, cached"
            assert (slot in free) <= (not self._indexed[slot]), f"slot {slot} is free but still indexed"
