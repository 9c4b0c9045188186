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
CLOCK_SKEW = 3600.0


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
            started = self._clock()
            repository = tier.repository
            listing = inventory.take(repository.objects(keys.ROOT))
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
                gone = [i for i in snapshot_ids if self._let_go(tier, space, listing, known, heirs, i)]
                deleted += len(gone)
                freed += sum(listing.snapshots[space, i].size for i in gone)
                if tombstones:
                    self._bury(tier, space, gone)
            files, bytes_freed = self._collect(tier, listing, known, foreign, started)
            self._forget_old_tombstones(tier, listing, started)
            repository.store.clean_uploads(started - self._config.gc_grace_seconds)
        return SweepReport(deleted, files, freed + bytes_freed)

    def _let_go(
        self,
        tier: Tier,
        space: Space,
        listing: Inventory,
        known: dict[tuple[Space, str], Manifest],
        heirs: commit.Heirs,
        snapshot_id: str,
    ) -> bool:
        """Delete one snapshot, unless it was used since the listing."""
        try:
            now = tier.repository.store.head(space.snapshot(snapshot_id))
        except NotFound:
            now = None
        if now is not None and now.modified > listing.snapshots[space, snapshot_id].modified:
            return False
        manifest = known.pop((space, snapshot_id))
        commit.erase(tier.repository, space, manifest, heirs)
        self._cache.forget(space, snapshot_id)
        self._hooks.on_gone(space, snapshot_id)
        return True

    def _bury(self, tier: Tier, space: Space, snapshot_ids: list[str]) -> None:
        for first in range(0, len(snapshot_ids), MAX_TOMBSTONE_IDS):
            event_id = ids.new_id(self._clock())
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
            before = self._read_condemned(tier, space)
            condemned = {file: before.get(file, started) for file in files}
            ripe = [
                f for f, since in condemned.items() if started - since >= grace and started - files[f].modified >= grace
            ]
            if ripe:
                needed = self._newly_needed(tier, space, listing, started)
                for file in ripe:
                    if file not in needed and self._delete_file(tier, space, file, files[file]):
                        count += 1
                        freed += files[file].size
                        del condemned[file]
            self._write_condemned(tier, space, condemned, before)
        return count, freed

    def _newly_needed(self, tier: Tier, space: Space, listing: Inventory, started: float) -> set[str]:
        """KV files of snapshots that appeared since the listing was taken."""
        floor = ids.id_floor(started - CLOCK_SKEW)
        needed: set[str] = set()
        for info in tier.repository.objects(space.snapshots()):
            parsed = keys.parse(info.key)
            if parsed is None or (space, parsed.name) in listing.snapshots:
                if parsed is not None and parsed.name > floor:
                    break
                continue
            try:
                needed |= self._cache.read(tier.repository, space, parsed.name).files()
            except NotFound:
                continue
        return needed

    def _delete_file(self, tier: Tier, space: Space, file: str, listed: ObjectInfo) -> bool:
        key = space.kv(file)
        try:
            if tier.repository.store.head(key).modified > listed.modified:
                return False  # a writer touched it: it is about to be referred to
        except NotFound:
            return False
        tier.repository.forget(key)
        tier.repository.store.delete(key)
        return True

    def _read_condemned(self, tier: Tier, space: Space) -> dict[str, float]:
        """Not signed: the worst a forger can do here is to shorten a grace period."""
        try:
            document = json.loads(tier.repository.store.get(space.condemned()))
        except (NotFound, ValueError):
            return {}
        if not isinstance(document, dict):
            return {}
        return {k: float(v) for k, v in document.items() if isinstance(v, (int, float)) and v <= self._clock()}

    def _write_condemned(self, tier: Tier, space: Space, condemned: dict[str, float], before: dict[str, float]) -> None:
        if condemned == before:
            return
        if condemned:
            tier.repository.store.put(space.condemned(), [json.dumps(condemned).encode()])
        else:
            tier.repository.store.delete(space.condemned())

    def _forget_old_tombstones(self, tier: Tier, listing: Inventory, started: float) -> None:
        for space, event_id, _ in listing.other.get("gone", []):
            if ids.id_time(event_id) < started - TOMBSTONE_SECONDS:
                tier.repository.store.delete(space.tombstone(event_id))


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
