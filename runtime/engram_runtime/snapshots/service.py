"""The snapshot service: the one object that the engine saves to and restores from, and that the server lists by.

It ties the parts together and owns the background thread; the work is in saver, restorer, sweeper, events and fsck.
"""

from __future__ import annotations

import builtins
import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots import fsck, inventory
from engram_runtime.snapshots.catalogue import Catalogue, Record
from engram_runtime.snapshots.events import EventLog
from engram_runtime.snapshots.io.host_tier import HostTier
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.io.repository import Repository
from engram_runtime.snapshots.io.s3.options import SCHEME, S3Options
from engram_runtime.snapshots.io.store import ObjectStore
from engram_runtime.snapshots.io.tensors import OrdinaryMemory
from engram_runtime.snapshots.keeper import Keeper
from engram_runtime.snapshots.loader import Loader
from engram_runtime.snapshots.outcomes import OutcomeLog
from engram_runtime.snapshots.overview import Overview
from engram_runtime.snapshots.policy import ids, keys
from engram_runtime.snapshots.policy.cost import Speed
from engram_runtime.snapshots.policy.identity import Keyring
from engram_runtime.snapshots.policy.keys import Space, is_ref
from engram_runtime.snapshots.quota import DiskQuota
from engram_runtime.snapshots.restorer import Restorer
from engram_runtime.snapshots.saver import Saver
from engram_runtime.snapshots.shared import Shared
from engram_runtime.snapshots.sources import FileSources
from engram_runtime.snapshots.sweeper import Sweeper, SweepHooks, sweep_quietly
from engram_runtime.snapshots.tiers import Breaker, Counters, MeteredStore, Tier
from engram_runtime.snapshots.types import (
    Capture,
    EventPage,
    Fetched,
    FsckReport,
    HostMemory,
    KVTransfer,
    Miss,
    Page,
    PrefetchReport,
    RestoreQuery,
    SaveResult,
    SnapshotConfig,
    SnapshotContent,
    SnapshotInfo,
    StateLayout,
    SweepReport,
    TierStatus,
)

log = logging.getLogger(__name__)
POLL_SECONDS = 30.0
LOOK_SECONDS = 1.0  # between two looks at the tiers' health
SAVE_NOW_SECONDS = 60.0
SAMPLED_TENANTS = 8


def open_store(uri: str, s3: S3Options | None = None) -> ObjectStore:
    """The object store of a `file:///path` or `s3://BUCKET[/PREFIX]` URI. ValueError for any other."""
    if uri.startswith(SCHEME):
        # By name: boto3 takes a second to import, and a machine without it can do everything else.
        opened: ObjectStore = importlib.import_module("engram_runtime.snapshots.io.s3.store").S3Store(
            s3 or S3Options.parse(uri), is_ref
        )
        return opened
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
        raise ValueError(f"store_uri must be file:///absolute/path or s3://BUCKET[/PREFIX], got {uri!r}")
    return LocalStore(Path(unquote(parts.path)))


class SnapshotService:
    """Implements types.Snapshots. Every call may come from any thread.

    `memory` is where host tensors lie (default: ordinary memory). `disk` and `store` replace the object stores that the
    configuration names (tests, and stores of other schemes).
    """

    def __init__(
        self,
        config: SnapshotConfig,
        *,
        state_abi: str,
        layout: StateLayout,
        transfer: KVTransfer,
        memory: HostMemory | None = None,
        clock: Callable[[], float] = time.time,
        disk: ObjectStore | None = None,
        store: ObjectStore | None = None,
    ) -> None:
        self.config = config
        counters = Counters()
        keyring = Keyring(config.tenant_key)
        catalogue = Catalogue()
        host = HostTier(config.host_bytes, layout)
        memory = memory or OrdinaryMemory()
        if disk is None and config.disk_path is not None:
            disk = LocalStore(config.disk_path)
        if store is None and config.store_uri is not None:
            store = open_store(config.store_uri, config.s3)
        tiers = []
        for name, inner in (("disk", disk), ("store", store)):
            if config.enabled and inner is not None:
                metered = MeteredStore(inner, name, counters)
                tiers.append(
                    Tier(name, Repository(name, metered, keyring, layout, verify=config.verify, memory=memory), metered)
                )
        self._shared = shared = Shared(
            config=config,
            abi=state_abi,
            layout=layout,
            transfer=transfer,
            memory=memory,
            keyring=keyring,
            catalogue=catalogue,
            host=host,
            host_speed=Speed("host"),
            tiers=tuple(tiers),
            sources=FileSources(catalogue, host, tuple(tiers), layout),
            counters=counters,
            clock=clock,
            outcomes=OutcomeLog(clock),
        )
        self._quota = DiskQuota(config.disk_bytes, self._not_stored_elsewhere, self._evicted, clock)
        for tier in tiers:
            if tier.name == "disk":
                self._quota.attach(tier)
            if not tier.probe():
                log.warning("snapshot tier %s is off: %s", tier.name, tier.writes.message)
        self._keeper = Keeper(shared, self._quota)
        self.overview = Overview(shared, self._keeper)
        self._events = EventLog(self._keeper.describe, self._keeper.learn_gone, clock, self.overview.observe)
        self.overview.attach(self._events)
        self._keeper.attach(self._events)
        self._saver = Saver(shared, self._quota, self._keeper.saved, self._keeper.erase_everywhere)
        self._loader = Loader(shared)
        self._restorer = Restorer(shared, self._loader, self._keeper.confirmed)
        hooks = SweepHooks(protected=self._not_stored_elsewhere, on_gone=self._keeper.swept)
        self._sweeper = Sweeper(config, hooks, clock, stateful=bool(layout.states))
        self._sweeping = threading.Lock()
        self._behind = False
        self._closed = threading.Event()
        self._background = threading.Thread(target=self._tend, name="engram-snapshots", daemon=True)
        if tiers:
            self._background.start()

    def make_room(self, nbytes: int) -> bool:
        """Let go of this much of what was used longest ago in host memory; False when there was nothing."""
        return self._shared.host.make_room(nbytes)

    # The engine's side

    def find(self, query: RestoreQuery) -> Fetched | Miss:
        if not self.config.enabled:
            return Miss("snapshots are off")
        result = self._restorer.find(query)
        if isinstance(result, Fetched):
            space = self._shared.space(query.tenant)
            record = self._shared.catalogue.get(space, result.snapshot_id)
            if record is not None:
                self._saver.in_background(result.conversation_id, lambda: self._after_restore(record))
        return result

    def _after_restore(self, record: Record) -> None:
        """Renew its age; give it to the tiers that lack it (a new replica's disk, a store that was away)."""
        self._keeper.used(record)
        if record.tiers and not record.level and all(tier.writes.healthy for tier in self._shared.tiers):
            self._saver.make_durable(record)

    def save(self, capture: Capture) -> None:
        if not self.config.enabled:
            capture.release()
            return
        self._saver.save(capture)

    # The server's side

    def resolve(
        self, tenant: str, conversation_id: str, turn_number: int | None = None, branch_name: str = "main"
    ) -> SnapshotInfo:
        record = self._keeper.resolve(tenant, conversation_id, turn_number, branch_name)
        return self._keeper.info(record)

    def get(self, tenant: str, snapshot_id: str) -> SnapshotInfo:
        return self._keeper.info(self._keeper.lookup(tenant, snapshot_id))

    def content(self, tenant: str, snapshot_id: str) -> SnapshotContent:
        return self._keeper.content(self._keeper.lookup(tenant, snapshot_id))

    def events(self, tenant: str, *, after: str | None = None, limit: int = 500) -> EventPage:
        if not 1 <= limit <= 1000:
            raise ValueError(f"limit must be in [1, 1000], got {limit}")
        space = self._keeper.space(tenant)
        return self._events.page(space, self._shared.authority, after, limit)

    def delete(self, tenant: str, snapshot_id: str) -> SnapshotInfo:
        try:
            record = self._keeper.lookup(tenant, snapshot_id)
        except NotFound:
            self._keeper.retry_deletion(self._keeper.space(tenant), snapshot_id)
            raise
        info = self._keeper.info(record)
        self._keeper.delete(record)
        return info

    def set_head(self, tenant: str, snapshot_id: str) -> SnapshotInfo:
        record = self._keeper.lookup(tenant, snapshot_id)
        self._keeper.set_head(record)
        return self._keeper.info(record)

    def prefetch(self, tenant: str, snapshot_id: str) -> PrefetchReport:
        record = self._keeper.lookup(tenant, snapshot_id)
        started = time.perf_counter()
        deadline = time.monotonic() + self.config.restore_deadline_seconds
        try:
            loaded = self._loader.load(record, record.manifest.pieces, record.manifest.forwarded, deadline)
        except TimeoutError:
            raise SnapshotError(f"snapshot {snapshot_id} was not read before the deadline") from None
        return PrefetchReport(record.snapshot_id, loaded.nbytes, (time.perf_counter() - started) * 1e3, loaded.tier)

    def save_now(
        self,
        tenant: str,
        conversation_id: str,
        *,
        turn_number: int | None = None,
        branch_name: str = "main",
        tag: str | None = None,
        pin: bool | None = None,
        ttl_seconds: int | None = None,
    ) -> SnapshotInfo:
        if tag is not None:
            ids.check_tag(tag)
        if ttl_seconds is not None and ttl_seconds <= 0:
            raise ValueError(f"ttl_seconds must be > 0, got {ttl_seconds}")
        self._saver.wait_gathered(SAVE_NOW_SECONDS)  # the turn that just ended may still be on its way here
        record = self._keeper.resolve(tenant, conversation_id, turn_number, branch_name)
        if not record.tiers and self._shared.tiers:
            outcome: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
            self._saver.make_durable(record, outcome.put)
            try:
                result = outcome.get(timeout=SAVE_NOW_SECONDS)
            except queue.Empty:
                raise SnapshotError("the save goes on in the background: it took longer than the deadline") from None
            if not record.tiers:
                raise SnapshotError(f"the snapshot could not be made durable: {result.reason}")
        self._keeper.relabel(record, tag=tag, pin=pin, ttl_seconds=ttl_seconds)
        return self._keeper.info(record)

    # Care

    def fsck(self, *, repair: bool = False) -> Sequence[FsckReport]:
        reports = []
        for tier in self._shared.tiers:
            with tier.reading():
                reports.append(fsck.check(tier.repository, repair=repair))
        return reports

    def sweep(self) -> SweepReport:
        total = SweepReport(0, 0, 0)
        if self.config.suspend_gc:
            return total
        with self._sweeping:
            for tier in self._shared.tiers:
                report = self._sweep_tier(tier)
                total = SweepReport(
                    total.snapshots_deleted + report.snapshots_deleted,
                    total.files_deleted + report.files_deleted,
                    total.bytes_deleted + report.bytes_deleted,
                )
        return total

    def sweep_store(self) -> SweepReport:
        """As sweep, of the tier whose word counts, and trouble is raised: a command must not end as if it had swept."""
        authority = self._shared.authority
        if authority is None:
            raise SnapshotError("there is no store to sweep")
        with self._sweeping:
            return self._sweeper.sweep(authority, tombstones=True)

    def _sweep_tier(self, tier: Tier) -> SweepReport:
        record_deletions = tier is self._shared.authority
        if tier.name != "disk":
            return sweep_quietly(self._sweeper, tier, tombstones=record_deletions)
        with self._quota.exclusive():
            return sweep_quietly(self._sweeper, tier, tombstones=record_deletions)

    def status(self) -> Sequence[TierStatus]:
        shared = self._shared
        found = [
            TierStatus(
                name="host",
                ready=True,
                reason="Ready",
                message="",
                bytes=shared.host.nbytes,
                capacity=shared.host.capacity,
                objects=shared.host.count,
                read_bytes_per_second=shared.host_speed.bytes_per_second if shared.host_speed.measured else None,
            )
        ]
        for tier in shared.tiers:
            bad: Breaker = tier.writes if not tier.writes.healthy else tier.reads
            disk = tier.name == "disk"
            found.append(
                TierStatus(
                    name=tier.name,
                    ready=bad.healthy,
                    reason=bad.reason if not bad.healthy else "Ready",
                    message=bad.message if not bad.healthy else getattr(tier.repository.store, "report", ""),
                    bytes=(self._quota.used or 0) if disk else tier.store.nbytes,
                    capacity=self._quota.capacity if disk else None,
                    objects=tier.store.objects,
                    read_bytes_per_second=tier.speed.bytes_per_second if tier.speed.measured else None,
                )
            )
        return found

    def counters(self) -> dict[str, float]:
        return {**self._shared.counters.read(), **self._saver.depth()}

    def gathered(self, deadline_seconds: float) -> bool:
        return self._saver.wait_gathered(deadline_seconds)

    def flush(self, deadline_seconds: float) -> bool:
        deadline = time.monotonic() + deadline_seconds
        self._saver.hurry()
        if not self._saver.wait(deadline_seconds):
            return False
        for record in self._keeper.host_only_tips() if self._shared.tiers else []:
            self._saver.make_durable(record)
        return self._saver.wait(deadline - time.monotonic())

    def close(self) -> None:
        self._closed.set()
        self._saver.close()
        self._loader.close()
        if self._background.is_alive():
            self._background.join(timeout=10)
        for tier in self._shared.tiers:
            with suppress(SnapshotError):
                tier.repository.store.close()
        self._shared.host.clear()

    def list(
        self,
        tenant: str,
        *,
        conversation_id: str | None = None,
        branch_name: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> Page:
        if not 1 <= limit <= 500:
            raise ValueError(f"limit must be in [1, 500], got {limit}")
        if after is not None and not ids.is_id(after):
            raise ValueError("after must be the next_after of an earlier page")
        found: builtins.list[SnapshotInfo] = []
        heads: dict[tuple[str, str], str | None] = {}
        for snapshot_id in self._keeper.ids_newest_first(tenant, conversation_id, after):
            if len(found) == limit:
                return Page(found, found[-1].snapshot_id)
            try:
                record = self._shared.load(self._keeper.space(tenant), snapshot_id, tenant)
            except NotFound:
                continue
            except SnapshotError as error:
                log.info("snapshot %s is left out of a listing: %s", snapshot_id, error)
                continue
            manifest = record.manifest
            if conversation_id not in (None, manifest.conversation_id) or branch_name not in (
                None,
                manifest.branch_name,
            ):
                continue
            if not record.expired(self._shared.clock()):
                found.append(self._keeper.info(record, heads))
        return Page(found, None)

    # Background

    def _tend(self) -> None:
        """Learn of deletions by other replicas; sweep."""
        interval = self.config.gc_interval_seconds
        next_sweep = time.monotonic() + interval
        pause = min(POLL_SECONDS, interval) if interval else POLL_SECONDS
        self._count()
        next_poll = time.monotonic() + pause
        while not self._closed.wait(min(pause, LOOK_SECONDS)):
            try:
                self._mend()
                if time.monotonic() >= next_poll:
                    self._keeper.poll()
                    next_poll = time.monotonic() + pause
                if interval and time.monotonic() >= next_sweep:
                    self.sweep()
                    next_sweep = time.monotonic() + interval
            except Exception:
                log.exception("snapshot background work failed")

    def _healthy(self) -> bool:
        return all(tier.writes.healthy and tier.reads.healthy for tier in self._shared.tiers)

    def _count(self) -> None:
        """What the tiers hold, before the first sweep says so. One listing a process."""
        for tier in self._shared.tiers:
            with suppress(SnapshotError), tier.reading():
                listing = inventory.take(tier.repository.objects(keys.ROOT))
                self._warn_of_other_keys(tier, listing)
                tier.store.holds(len(listing.snapshots) + len(listing.kv), listing.nbytes)

    def _warn_of_other_keys(self, tier: Tier, listing: inventory.Inventory) -> None:
        """A key that was lost or replaced does not announce itself: there is just nothing to restore."""
        newest = {space.namespace: (space, snapshot_id) for space, snapshot_id in reversed(listing.snapshots)}
        strangers = 0
        for space, snapshot_id in list(newest.values())[:SAMPLED_TENANTS]:
            try:
                tier.repository.open_snapshot(space, snapshot_id)
            except SnapshotError as error:
                strangers += "signature" in str(error)
        if strangers:
            log.warning(
                "snapshot tier %s holds snapshots that are not signed with this tenant key (of %d of %d tenants looked "
                "at): they cannot be restored here, and are left alone",
                *(tier.name, strangers, min(len(newest), SAMPLED_TENANTS)),
            )

    def _mend(self) -> None:
        """Try a tier that was away, within seconds and whatever it was that failed: nobody may be writing, people watch
        the condition, and restores wait longer for their own next try. Then give it the newest turns that it missed."""
        for tier in self._shared.tiers:
            if not (tier.writes.healthy and tier.reads.healthy) and tier.writes.closed:
                tier.probe()
        if not self._healthy():
            self._behind = True
        elif self._behind:
            self._behind = False
            for record in self._keeper.tips():
                if not record.level:
                    self._saver.make_durable(record)

    def _not_stored_elsewhere(self) -> set[str]:
        """On a disk in front of a store: snapshots that the store does not have yet."""
        if not any(tier.name == "store" for tier in self._shared.tiers):
            return set()
        return {r.snapshot_id for r in self._shared.catalogue.records() if r.own and r.tiers == {"disk"}}

    def _evicted(self, space: Space, snapshot_id: str) -> None:
        record = self._shared.catalogue.get(space, snapshot_id)
        if record is not None:
            self._shared.forget(record, "disk")
        self._shared.counters.add("evictions.disk")
