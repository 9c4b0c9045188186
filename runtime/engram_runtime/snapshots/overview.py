"""Every tenant's snapshots of this model, for the administrator's port: listed, followed, labelled and deleted by id.

The other calls begin with a tenant's name, which this process may never have heard. Here namespaces are read off the
store, and what is told of a snapshot comes from its signed manifest: enough for all but restoring.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from operator import itemgetter
from typing import Literal

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.catalogue import Record
from engram_runtime.snapshots.events import EventLog
from engram_runtime.snapshots.inventory import ManifestCache
from engram_runtime.snapshots.io.store import StoreUnavailable
from engram_runtime.snapshots.keeper import Keeper
from engram_runtime.snapshots.policy import ids, keys
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest
from engram_runtime.snapshots.policy.records import NEVER, Label, effective_expiry
from engram_runtime.snapshots.shared import Shared
from engram_runtime.snapshots.tiers import Tier
from engram_runtime.snapshots.views import (
    KEEP,
    Census,
    Kind,
    Removed,
    SaveOutcomes,
    SnapshotView,
    ViewEvent,
    ViewEvents,
    ViewPage,
)

log = logging.getLogger(__name__)
MAX_EVENTS = 10_000
MAX_LIMIT = 500
READERS = 8
SPACES_SECONDS = 10.0
LOOK_SECONDS = 15.0  # between two looks into the store for what other replicas did: listings cost money
COUNT_SECONDS = 60.0
COUNT_SHARE = 50  # a count that took a second is not made again for this many
MANIFESTS = 4096


class Overview:
    """Implements views.SnapshotOverview. `attach` it to the event log before use."""

    def __init__(self, shared: Shared, keeper: Keeper) -> None:
        self._shared = shared
        self._keeper = keeper
        self._log: EventLog | None = None
        self._lock = threading.Lock()
        self._epoch = secrets.token_hex(8)
        self._sequence = 0
        self._events: deque[tuple[Kind, Space, str]] = deque(maxlen=MAX_EVENTS)
        self._spaces: frozenset[Space] = frozenset()
        self._spaces_until = 0.0
        self._heard: set[Space] = set()  # of tenants whose first snapshot may be younger than `_spaces`
        self._look_after = 0.0
        self._manifests = ManifestCache(MANIFESTS)
        self._count: Census | None = None
        self._count_until = 0.0
        self._counting: threading.Thread | None = None

    def attach(self, log: EventLog) -> None:
        self._log = log

    def observe(self, kind: Kind, space: Space, snapshot_id: str) -> None:
        """Told of everything that the event log of any tenant takes in."""
        with self._lock:
            self._events.append((kind, space, snapshot_id))
            self._sequence += 1
            if space not in self._spaces:
                self._heard.add(space)

    # Reading

    def page(self, *, limit: int = 100, after: str | None = None) -> ViewPage:
        if not 1 <= limit <= MAX_LIMIT:
            raise ValueError(f"limit must be in [1, {MAX_LIMIT}], got {limit}")
        if after is not None and not ids.is_id(after):
            raise ValueError("after must be the next of an earlier page")
        authority = self._shared.authority
        if authority is None:
            return self._page_of_memory(limit, after)
        streams = [self._ids(authority, space, after) for space in self._all_spaces()]
        merged = heapq.merge(*streams, key=itemgetter(0))
        labelled: dict[Space, set[str]] = {}
        found: list[SnapshotView] = []
        last = None
        with ThreadPoolExecutor(READERS, thread_name_prefix="engram-overview") as pool:
            while len(found) < limit:
                batch = list(islice(merged, limit - len(found)))
                if not batch:
                    return ViewPage(found, None)
                for _, space in batch:
                    if space not in labelled:
                        labelled[space] = self._labelled(authority, space)
                views = pool.map(lambda item: self._listed(authority, item[1], item[0], labelled[item[1]]), batch)
                found += [view for view in views if view is not None]
                last = batch[-1][0]
        return ViewPage(found, last)

    def view(self, snapshot_id: str) -> SnapshotView:
        space, manifest = self._find(snapshot_id)
        return self._view(space, manifest, self._label(space, snapshot_id))

    def events(self, *, after: str | None = None, limit: int = MAX_LIMIT) -> ViewEvents:
        if not 1 <= limit <= MAX_LIMIT:
            raise ValueError(f"limit must be in [1, {MAX_LIMIT}], got {limit}")
        epoch, _, number = (after or "-").partition("-")
        if after is not None and not (len(epoch) == 16 and number.isdigit() and len(number) <= 18):
            raise ValueError("after must be a cursor that an earlier call returned")
        self._look()
        with self._lock:
            first = self._sequence - len(self._events)
            start = int(number) if epoch == self._epoch else -1
            if not first <= start <= self._sequence:
                return ViewEvents([], f"{self._epoch}-{self._sequence}", lost=True)
            fresh = list(islice(self._events, start - first, start - first + limit))
        described = [self._described(*event) for event in fresh]
        found = [event for event in described if event is not None]
        return ViewEvents(found, f"{self._epoch}-{start + len(fresh)}", lost=False)

    def census(self, wait_seconds: float = 2.0) -> Census | None:
        if self._shared.authority is None:
            records = self._shared.catalogue.records()
            return Census(len(records), self._shared.host.nbytes)
        with self._lock:
            thread = self._counting
            if thread is None and time.monotonic() >= self._count_until:
                thread = threading.Thread(target=self._take_census, name="engram-census", daemon=True)
                self._counting = thread
                thread.start()
            known = self._count
        if known is None and thread is not None:
            thread.join(wait_seconds)
        with self._lock:
            return self._count

    def outcomes(self) -> SaveOutcomes:
        return self._shared.outcomes.read()

    # Changing

    def change(
        self, snapshot_id: str, *, pinned: bool | None = None, ttl_seconds: int | Literal["keep"] | None = KEEP
    ) -> SnapshotView:
        if isinstance(ttl_seconds, int) and ttl_seconds <= 0:
            raise ValueError(f"ttl_seconds must be > 0, got {ttl_seconds}")
        space, manifest = self._find(snapshot_id)
        known = self._label(space, snapshot_id) or Label()
        expires = known.expires
        if ttl_seconds is None:
            expires = NEVER
        elif ttl_seconds != KEEP:
            expires = self._shared.clock() + ttl_seconds
        label = Label(known.pinned if pinned is None else pinned, known.tag, expires)
        if label != known:
            self._keeper.label(self._record(space, manifest), label)
            self.observe("changed", space, snapshot_id)
        return self._view(space, manifest, label)

    def remove(self, snapshot_id: str) -> Removed:
        ids.check_snapshot_id(snapshot_id)
        for space in self._all_spaces():
            # Deleted here before, while a tier was out of reach: done when every tier has heard of it.
            if self._keeper.retry_deletion(space, snapshot_id):
                raise NotFound(f"snapshot {snapshot_id} does not exist")
        space, manifest = self._find(snapshot_id)
        known = self._shared.catalogue.get(space, snapshot_id)
        removed = Removed(
            self._view(space, manifest, None), None if known is None else known.tenant, manifest.conversation_id
        )
        self._keeper.delete(self._record(space, manifest))
        self._manifests.forget(space, snapshot_id)
        return removed

    # Inside

    def _all_spaces(self) -> list[Space]:
        """Every tenant of whom there is something; StoreUnavailable when that cannot be known."""
        with self._lock:
            if time.monotonic() < self._spaces_until:
                return self._in_order()
            heard = set(self._heard)
        found = {record.space for record in self._shared.catalogue.records()}
        authority = self._shared.authority
        if authority is not None:
            abi = self._shared.abi[:16]
            with authority.reading():
                found |= {Space(namespace, abi) for namespace in _namespaces(authority)}
        with self._lock:
            self._spaces = frozenset(found)
            self._spaces_until = time.monotonic() + SPACES_SECONDS
            self._heard -= heard  # they are among those found, or have nothing any more
            return self._in_order()

    def _in_order(self) -> list[Space]:
        return sorted(self._spaces | self._heard, key=lambda space: space.namespace)

    def _known_spaces(self, snapshot_id: str) -> Iterator[Space]:
        for space in {record.space for record in self._shared.catalogue.records()}:
            if self._shared.catalogue.get(space, snapshot_id) is not None:
                yield space

    def _find(self, snapshot_id: str) -> tuple[Space, Manifest]:
        """From memory, else from the tier whose word counts. NotFound."""
        ids.check_snapshot_id(snapshot_id)
        authority = self._shared.authority
        for space in self._known_spaces(snapshot_id):
            record = self._shared.catalogue.get(space, snapshot_id)
            if record is not None and self._keeper.confirmed(record):
                return space, record.manifest
        for space in self._all_spaces() if authority is not None else []:
            if authority is None or self._shared.catalogue.is_gone(space, snapshot_id):
                continue
            with suppress(NotFound):
                return space, self._shared.open(authority, space, snapshot_id).manifest
        raise NotFound(f"snapshot {snapshot_id} does not exist")

    def _record(self, space: Space, manifest: Manifest) -> Record:
        """The one in memory, else one that is only good for deleting and labelling."""
        known = self._shared.catalogue.get(space, manifest.snapshot_id)
        if known is not None:
            return known
        tiers = set()
        for tier in self._shared.tiers:
            with suppress(NotFound), tier.reading():
                tier.repository.store.head(space.snapshot(manifest.snapshot_id))
                tiers.add(tier.name)
        return Record(space, manifest, array("I"), "", tiers)

    def _label(self, space: Space, snapshot_id: str) -> Label | None:
        """As stored, because another replica may have changed it; from memory where nothing is stored."""
        authority = self._shared.authority
        record = self._shared.catalogue.get(space, snapshot_id)
        if authority is None or (record is not None and authority.name not in record.tiers):
            return None if record is None else record.label
        with authority.reading():
            return authority.repository.read_label(space, snapshot_id)

    def _ids(self, tier: Tier, space: Space, after: str | None) -> Iterator[tuple[str, Space]]:
        start = None if after is None else space.snapshot(after)
        with tier.reading():
            for info in tier.repository.objects(space.snapshots(), start):
                parsed = keys.parse(info.key)
                if parsed is not None:
                    yield parsed.name, space

    def _labelled(self, tier: Tier, space: Space) -> set[str]:
        """Labels are few, so listing them is cheaper than asking for each."""
        with tier.reading():
            parsed = [keys.parse(info.key) for info in tier.repository.objects(space.labels())]
        return {key.name for key in parsed if key is not None}

    def _listed(self, tier: Tier, space: Space, snapshot_id: str, labelled: set[str]) -> SnapshotView | None:
        """None for what is gone, expired, or cannot be trusted (another key's, or damaged: fsck names it)."""
        if self._shared.catalogue.is_gone(space, snapshot_id):
            return None
        try:
            with tier.reading():
                manifest = self._manifests.read(tier.repository, space, snapshot_id)
                label = tier.repository.read_label(space, snapshot_id) if snapshot_id in labelled else None
        except StoreUnavailable:
            raise
        except SnapshotError:
            return None
        return self._current(space, manifest, label)

    def _page_of_memory(self, limit: int, after: str | None) -> ViewPage:
        records = sorted(self._shared.catalogue.records(), key=lambda record: record.snapshot_id)
        later = [record for record in records if after is None or record.snapshot_id > after]
        views = [self._current(record.space, record.manifest, record.label) for record in later[:limit]]
        return ViewPage(
            [view for view in views if view is not None], later[limit - 1].snapshot_id if len(later) > limit else None
        )

    def _current(self, space: Space, manifest: Manifest, label: Label | None) -> SnapshotView | None:
        view = self._view(space, manifest, label)
        expired = view.expires is not None and view.expires <= self._shared.clock() and not view.pinned
        return None if expired else view

    def _view(self, space: Space, manifest: Manifest, label: Label | None) -> SnapshotView:
        signer = self._shared.keyring.signer(space.namespace)
        label = label or Label()
        return SnapshotView(
            snapshot_id=manifest.snapshot_id,
            tenant_hash=space.namespace,
            conversation_hash=signer.hide("conversation", manifest.conversation_id),
            branch_name_hash=signer.hide("branch", manifest.branch_name),
            turn_number=manifest.turn_number,
            boundary=manifest.boundary,
            tokens=manifest.forwarded,
            bytes=manifest.nbytes,
            created=manifest.created,
            expires=effective_expiry(manifest.expires, label),
            pinned=manifest.pinned if label.pinned is None else label.pinned,
            tag=manifest.tag if label.tag is None else label.tag,
            parent_id=manifest.parent_id,
            uri=self._uri(space, manifest.snapshot_id),
        )

    def _uri(self, space: Space, snapshot_id: str) -> str | None:
        config, authority = self._shared.config, self._shared.authority
        if authority is None:
            return None
        base = config.store_uri if authority.name == "store" else f"file://{config.disk_path}"
        return None if base is None else f"{base.rstrip('/')}/{space.snapshot(snapshot_id)}"

    # Following

    def _look(self) -> None:
        """What other replicas saved and deleted comes in through the store."""
        authority = self._shared.authority
        with self._lock:
            if authority is None or self._log is None or time.monotonic() < self._look_after:
                return
            self._look_after = time.monotonic() + LOOK_SECONDS
        with suppress(SnapshotError):  # then what this process knows has to do
            for space in self._all_spaces():
                self._log.refresh(space, authority)

    def _described(self, kind: Kind, space: Space, snapshot_id: str) -> ViewEvent | None:
        """None when the snapshot has gone since: another event says so."""
        if kind == "deleted":
            return ViewEvent(kind, SnapshotView(snapshot_id, space.namespace))
        try:
            known = self._shared.catalogue.get(space, snapshot_id)
            authority = self._shared.authority
            if known is not None:
                manifest = known.manifest
            elif authority is not None:
                with authority.reading():
                    manifest = self._manifests.read(authority.repository, space, snapshot_id)
            else:
                return None
            return ViewEvent(kind, self._view(space, manifest, self._label(space, manifest.snapshot_id)))
        except SnapshotError:
            return None

    def _take_census(self) -> None:
        started = time.monotonic()
        count, total = 0, 0
        authority = self._shared.authority
        try:
            if authority is not None:
                with authority.reading():
                    for space in self._all_spaces():
                        for info in authority.repository.objects(space.prefix):
                            parsed = keys.parse(info.key)
                            count += parsed is not None and parsed.kind == "snap"
                            total += info.size
            with self._lock:
                self._count = Census(count, total)
        except SnapshotError as error:
            log.info("snapshots could not be counted: %s", error)
        finally:
            with self._lock:
                took = time.monotonic() - started
                self._count_until = time.monotonic() + max(COUNT_SECONDS, COUNT_SHARE * took)
                self._counting = None


def _namespaces(tier: Tier) -> Iterator[str]:
    """By leaps: one request a tenant, however much a tenant holds."""
    after: str | None = None
    while page := tier.repository.store.list(keys.ROOT, after=after, limit=1):
        namespace = page[0].key[len(keys.ROOT) :].partition("/")[0]
        if ids.is_id(namespace):
            yield namespace
        after = f"{keys.ROOT}{namespace}0"  # "0" is the character after "/": past everything of this tenant
