"""Retention and garbage collection of one repository: mark, wait out a grace period, look again, delete.

Two things make it safe beside writers that share pieces. A KV file is deleted only when it was found unreferenced a
grace period ago and still is: a writer that relies on a file has seen its reference more recently than that. And before
each delete the file's age and the newest manifests are looked at again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Set
from dataclasses import dataclass

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots import commit, inventory
from engram_runtime.snapshots.inventory import Inventory, ManifestCache
from engram_runtime.snapshots.io.store import ObjectInfo
from engram_runtime.snapshots.policy import ids, keys
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest
from engram_runtime.snapshots.policy.records import MAX_TOMBSTONE_IDS
from engram_runtime.snapshots.policy.retention import RetentionPolicy, choose_deletions
from engram_runtime.snapshots.tiers import Tier
from engram_runtime.snapshots.types import SnapshotConfig, SweepReport

log = logging.getLogger(__name__)
TOMBSTONE_SECONDS = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class SweepHooks:
    """`protected` ids are never deleted; `on_gone` is told of each snapshot that was."""

    protected: Callable[[], Set[str]]
    on_gone: Callable[[Space, str], None]


class Sweeper:
    """`stateful`: the model has recurrent state, so that an anchor is of no use without its own snapshot's state."""

    def __init__(
        self, config: SnapshotConfig, hooks: SweepHooks, clock: Callable[[], float], *, stateful: bool
    ) -> None:
        self._config = config
        self._stateful = stateful
        self._hooks = hooks
        self._clock = clock
        self._cache = ManifestCache()

    def sweep(self, tier: Tier, *, tombstones: bool) -> SweepReport:
        """One pass. `tombstones` on the tier that other replicas read. StoreUnavailable ends it early."""
        with tier.reading():
            repository = tier.repository
            # Ages are told by the clock that dated the files: this machine's may be hours off.
            clock = repository.store.now()
            started = self._clock() if clock is None else clock
            listing = inventory.take(repository.objects(keys.ROOT))
            tier.store.holds(len(listing.snapshots) + len(listing.kv), listing.nbytes)
            known = inventory.manifests(repository, listing, self._cache)
            foreign = inventory.foreign(listing, known)
            policy = RetentionPolicy(
                keep_last=self._config.keep_last,
                max_age_seconds=self._config.max_age_seconds,
                max_conversations=self._config.max_conversations,
                max_total_bytes=self._config.max_total_bytes,
            )
            facts = inventory.facts(repository, listing, known, self._hooks.protected())
            chosen = choose_deletions((fact for _, fact in facts.values()), policy, started)
            by_space: dict[Space, list[str]] = {}
            for snapshot_id in chosen:
                space = facts[snapshot_id][0]
                # A young one may still be on its way to its head.
                if started - listing.snapshots[space, snapshot_id].modified >= self._config.gc_grace_seconds:
                    by_space.setdefault(space, []).append(snapshot_id)
        deleted, freed = 0, 0
        with tier.writing():
            for space, snapshot_ids in by_space.items():
                staying = {i: m for (s, i), m in known.items() if s == space and i not in chosen}
                heirs = {} if self._stateful else _heirs(staying)
                gone = [i for i in snapshot_ids if self._is_unused(tier, space, listing, i)]
                self._let_go(tier, space, known, heirs, gone)
                deleted += len(gone)
                freed += sum(listing.snapshots[space, i].size for i in gone)
                if tombstones:
                    self._bury(tier, space, gone, started)
            files, bytes_freed = self._collect(tier, listing, known, foreign, started)
            self._forget_old_tombstones(tier, listing, started)
            repository.store.clean_uploads(started - self._config.gc_grace_seconds)
        return SweepReport(deleted, files, freed + bytes_freed)

    def _is_unused(self, tier: Tier, space: Space, listing: Inventory, snapshot_id: str) -> bool:
        """Since the listing."""
        try:
            now = tier.repository.store.head(space.snapshot(snapshot_id))
        except NotFound:
            return True
        return now.modified <= listing.snapshots[space, snapshot_id].modified

    def _let_go(
        self,
        tier: Tier,
        space: Space,
        known: dict[tuple[Space, str], Manifest],
        heirs: commit.Heirs,
        snapshot_ids: list[str],
    ) -> None:
        """Delete snapshots."""
        commit.erase_all(tier.repository, space, [known.pop((space, i)) for i in snapshot_ids], heirs)
        for snapshot_id in snapshot_ids:
            self._cache.forget(space, snapshot_id)
            self._hooks.on_gone(space, snapshot_id)

    def _bury(self, tier: Tier, space: Space, snapshot_ids: list[str], started: float) -> None:
        for first in range(0, len(snapshot_ids), MAX_TOMBSTONE_IDS):
            event_id = ids.new_id(started)
            tier.repository.write_tombstone(space, event_id, snapshot_ids[first : first + MAX_TOMBSTONE_IDS])

    def _collect(
        self,
        tier: Tier,
        listing: Inventory,
        known: dict[tuple[Space, str], Manifest],
        foreign: Set[str],
        started: float,
    ) -> tuple[int, int]:
        """(files, bytes) of unreferenced KV deleted."""
        grace = self._config.gc_grace_seconds
        unreferenced = inventory.unreferenced(listing, known)
        by_space: dict[Space, dict[str, ObjectInfo]] = {}
        for (space, file), info in unreferenced.items():
            by_space.setdefault(space, {})[file] = info
        for space, _, _ in listing.other.get("sweep", []):
            by_space.setdefault(space, {})
        count, freed = 0, 0
        for space, files in by_space.items():
            if space.namespace in foreign:
                continue
            before = self._read_condemned(tier, space, started)
            condemned = {file: before.get(file, started) for file in files}
            ripe = [
                f for f, since in condemned.items() if started - since >= grace and started - files[f].modified >= grace
            ]
            if ripe:
                needed = self._newly_needed(tier, space, listing)
                going = [f for f in ripe if f not in needed and self._is_untouched(tier, space.kv(f), files[f])]
                for file in going:
                    tier.repository.forget(space.kv(file))
                tier.repository.store.delete_many([space.kv(file) for file in going])
                count += len(going)
                freed += sum(files[file].size for file in going)
                condemned = {file: since for file, since in condemned.items() if file not in going}
            self._write_condemned(tier, space, condemned, before)
        return count, freed

    def _newly_needed(self, tier: Tier, space: Space, listing: Inventory) -> set[str]:
        """KV files of snapshots that appeared since the listing was taken. All are looked at: an id has the time of its
        writer's clock, whatever that was."""
        needed: set[str] = set()
        for info in tier.repository.objects(space.snapshots()):
            parsed = keys.parse(info.key)
            if parsed is None or (space, parsed.name) in listing.snapshots:
                continue
            try:
                needed |= self._cache.read(tier.repository, space, parsed.name).files()
            except NotFound:
                continue
        return needed

    def _is_untouched(self, tier: Tier, key: str, listed: ObjectInfo) -> bool:
        """A writer touches what it is about to refer to."""
        try:
            return tier.repository.store.head(key).modified <= listed.modified
        except NotFound:
            return False

    def _read_condemned(self, tier: Tier, space: Space, started: float) -> dict[str, float]:
        """Not signed: the worst a forger can do here is to shorten a grace period."""
        try:
            document = json.loads(tier.repository.store.get(space.condemned()))
        except (NotFound, ValueError):
            return {}
        if not isinstance(document, dict):
            return {}
        return {k: float(v) for k, v in document.items() if isinstance(v, (int, float)) and v <= started}

    def _write_condemned(self, tier: Tier, space: Space, condemned: dict[str, float], before: dict[str, float]) -> None:
        if condemned == before:
            return
        if condemned:
            tier.repository.store.put(space.condemned(), [json.dumps(condemned).encode()])
        else:
            tier.repository.store.delete(space.condemned())

    def _forget_old_tombstones(self, tier: Tier, listing: Inventory, started: float) -> None:
        old = [
            space.tombstone(event_id)
            for space, event_id, _ in listing.other.get("gone", [])
            if ids.id_time(event_id) < started - TOMBSTONE_SECONDS
        ]
        tier.repository.store.delete_many(old)


def _heirs(staying: dict[str, Manifest]) -> dict[str, str]:
    """Of each piece, the newest snapshot that keeps it: a shared system prompt outlives the turn that first had it."""
    oldest_first = sorted(staying.values(), key=lambda manifest: manifest.created)
    return {piece.chain: m.snapshot_id for m in oldest_first for piece in m.pieces if piece.end == piece.tensor_end}


def sweep_quietly(sweeper: Sweeper, tier: Tier, *, tombstones: bool) -> SweepReport:
    """For the background thread: trouble is logged and waits for the next round."""
    try:
        return sweeper.sweep(tier, tombstones=tombstones)
    except SnapshotError as error:
        log.warning("sweep of tier %s ended early: %s", tier.name, error)
        return SweepReport(0, 0, 0)
