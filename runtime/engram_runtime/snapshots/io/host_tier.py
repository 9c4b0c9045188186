"""The host tier: pieces and states in memory, least recently used first out, within a byte budget.

KV and states have separate budgets on a hybrid model: one long conversation's KV must not push out the states of a
hundred short ones, which are worthless without each other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from engram_runtime.snapshots.io import tensors
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.types import StateLayout


class ItemKey(NamedTuple):
    """A KV piece (file and tensor) or a state (snapshot id, STATE or START_STATE) of one tenant and model."""

    space: Space
    owner: str
    tensor: str


STATE = "state"
START_STATE = "start state"


class HostTier:
    """Thread-safe. Readers keep what they got even when it is evicted meanwhile: tensors are shared, never reused."""

    def __init__(self, capacity_bytes: int, layout: StateLayout) -> None:
        shared = bool(layout.kv_layers and layout.states)
        self._pools = {
            "kv": _Pool(capacity_bytes // 2 if shared else capacity_bytes),
            STATE: _Pool(capacity_bytes // 2 if shared else capacity_bytes),
        }
        self._capacity = capacity_bytes
        self._lock = threading.Lock()

    def put(self, key: ItemKey, value: Mapping[str, Tensor]) -> bool:
        """False when it is larger than the budget and was not kept."""
        with self._lock:
            return self._pool(key).put(key, value)

    def get(self, key: ItemKey) -> Mapping[str, Tensor] | None:
        with self._lock:
            return self._pool(key).get(key)

    def __contains__(self, key: ItemKey) -> bool:
        with self._lock:
            return key in self._pool(key).items

    def remove(self, key: ItemKey) -> None:
        with self._lock:
            self._pool(key).remove(key)

    def make_room(self, nbytes: int) -> bool:
        """Evict at least `nbytes`, from the fuller pool first; False when there was nothing.

        However much of the capacity is free: whoever asks has found no memory, since what is on its way here has some.
        """
        with self._lock:
            before = left = sum(pool.used for pool in self._pools.values())
            while left and left > before - nbytes:
                fullest = max(self._pools.values(), key=lambda pool: pool.used)
                left -= fullest.used
                fullest.evict()
                left += fullest.used
            return left < before

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(pool.used for pool in self._pools.values())

    @property
    def count(self) -> int:
        with self._lock:
            return sum(len(pool.items) for pool in self._pools.values())

    @property
    def capacity(self) -> int:
        return self._capacity

    def clear(self) -> None:
        with self._lock:
            for pool in self._pools.values():
                pool.items.clear()
                pool.used = 0

    def _pool(self, key: ItemKey) -> _Pool:
        return self._pools[STATE if key.tensor in (STATE, START_STATE) else "kv"]


class _Pool:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.items: OrderedDict[ItemKey, tuple[Mapping[str, Tensor], int]] = OrderedDict()

    def put(self, key: ItemKey, value: Mapping[str, Tensor]) -> bool:
        size = sum(tensors.nbytes(tensor) for tensor in value.values())
        self.remove(key)
        if size > self.capacity:
            return False
        while self.used + size > self.capacity:
            self.evict()
        self.items[key] = (value, size)
        self.used += size
        return True

    def evict(self) -> None:
        """The least recently used item."""
        _, (_, freed) = self.items.popitem(last=False)
        self.used -= freed

    def get(self, key: ItemKey) -> Mapping[str, Tensor] | None:
        found = self.items.get(key)
        if found is None:
            return None
        self.items.move_to_end(key)
        return found[0]

    def remove(self, key: ItemKey) -> None:
        found = self.items.pop(key, None)
        if found is not None:
            self.used -= found[1]
