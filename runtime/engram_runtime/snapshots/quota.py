"""Keeps the disk tier within its bytes: the least recently used snapshots go first, then the KV that only they needed.

The order of use survives restarts because it is the files' modification time, which every use renews.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots import commit, inventory
from engram_runtime.snapshots.inventory import Inventory, ManifestCache
from engram_runtime.snapshots.policy import keys
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest
from engram_runtime.snapshots.policy.retention import RetentionPolicy, choose_deletions
from engram_runtime.snapshots.tiers import Tier

LOW_WATER = 0.9  # evict a little more than needed, so that not every save evicts


class NoRoom(SnapshotError):
    """The snapshot does not fit the disk tier's quota."""


class DiskQuota:
    """`protected` names snapshots that are on no other durable tier yet; `on_evicted` is told of each that went."""

    def __init__(
        self,
        capacity_bytes: int,
        protected: Callable[[], Set[str]],
        on_evicted: Callable[[Space, str], None],
        clock: Callable[[], float],
    ) -> None:
        self.capacity = capacity_bytes
        self.used: int | None = None
        self._protected = protected
        self._on_evicted = on_evicted
        self._clock = clock
        self._cache = ManifestCache()
        self._lock = threading.RLock()
        self._tier: Tier | None = None

    def attach(self, tier: Tier) -> None:
        self._tier = tier

    @contextmanager
    def room(self, need: int) -> Iterator[None]:
        """Hold the disk for one save of `need` bytes, after making room. NoRoom when it cannot be made.

        Saves to the disk and evictions exclude each other: a piece must not vanish between the look and the manifest.
        """
        with self._lock:
            if need > self.capacity:
                raise NoRoom(f"{need} bytes do not fit the disk tier's quota of {self.capacity}")
            if self.used is None or self.used + need > self.capacity:
                self._evict(need)
            try:
                yield
            finally:
                self.used = (self.used or 0) + need

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the disk for a deletion; what is used is counted again at the next save."""
        with self._lock:
            try:
                yield
            finally:
                self.used = None

    def _evict(self, need: int) -> None:
        tier = self._tier
        if tier is None:
            return
        repository = tier.repository
        listing = inventory.take(repository.objects(keys.ROOT))
        self.used = listing.nbytes
        if self.used + need <= self.capacity:
            return
        known = inventory.manifests(repository, listing, self._cache)
        facts = inventory.facts(repository, listing, known, self._protected())
        for space, snapshot_id in listing.snapshots.keys() - known.keys():
            repository.store.delete(space.snapshot(snapshot_id))  # damaged, or signed by a key that is gone
        target = max(0, int(self.capacity * LOW_WATER) - need)
        policy = RetentionPolicy(keep_last=1 << 30, max_total_bytes=target)
        for snapshot_id in choose_deletions((fact for _, fact in facts.values()), policy, self._clock()):
            space = facts[snapshot_id][0]
            commit.erase(repository, space, known.pop((space, snapshot_id)))
            self._cache.forget(space, snapshot_id)
            self._on_evicted(space, snapshot_id)
        self._drop_unreferenced(tier, listing, known)
        self.used = sum(info.size for info in repository.objects(keys.ROOT))
        if self.used + need > self.capacity:
            raise NoRoom(f"{need} bytes do not fit: {self.used} of {self.capacity} are pinned or not stored elsewhere")

    def _drop_unreferenced(self, tier: Tier, listing: Inventory, known: Mapping[tuple[Space, str], Manifest]) -> None:
        for space, file in inventory.unreferenced(listing, known):
            key = space.kv(file)
            tier.repository.forget(key)
            tier.repository.store.delete(key)
