"""Looks snapshots up, describes, labels, moves and deletes them: the verbs behind the REST calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress

from engram_runtime.errors import Deleted, NotFound, SnapshotError
from engram_runtime.snapshots import commit
from engram_runtime.snapshots.catalogue import Record
from engram_runtime.snapshots.events import EventLog
from engram_runtime.snapshots.io.host_tier import START_STATE, STATE, ItemKey
from engram_runtime.snapshots.io.store import StoreUnavailable, public
from engram_runtime.snapshots.policy import ids, keys
from engram_runtime.snapshots.policy.boundaries import rank
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest
from engram_runtime.snapshots.policy.records import Label
from engram_runtime.snapshots.quota import DiskQuota
from engram_runtime.snapshots.shared import Shared
from engram_runtime.snapshots.tiers import Tier
from engram_runtime.snapshots.types import SnapshotContent, SnapshotInfo

log = logging.getLogger(__name__)
REFRESH_FRACTION = 16  # a snapshot's age is renewed at most this many times per max_age
REFRESH_AT_MOST = 3600.0


class Keeper:
    def __init__(self, shared: Shared, quota: DiskQuota) -> None:
        self._shared = shared
        self._quota = quota
        self._events: EventLog | None = None
        self._lock = threading.Lock()
        self._active: set[Space] = set()  # tenants seen since the last poll
        self._undone: dict[tuple[Space, str], tuple[Record, str]] = {}  # deletions that some tier has not heard of
        self._refreshed: dict[tuple[Space, str], float] = {}

    def attach(self, events: EventLog) -> None:
        self._events = events

    def space(self, tenant: str) -> Space:
        ids.check_tenant(tenant)
        space = self._shared.space(tenant)
        with self._lock:
            self._active.add(space)
        return space

    # Looking up

    def lookup(self, tenant: str, snapshot_id: str) -> Record:
        """NotFound unless it is there, this tenant's, not deleted by anyone, and not expired."""
        ids.check_snapshot_id(snapshot_id)
        record = self._shared.load(self.space(tenant), snapshot_id, tenant)
        if (record.expired(self._shared.clock()) and not self._extended(record)) or not self.confirmed(record):
            raise Deleted(f"snapshot {snapshot_id} does not exist")
        return record

    def resolve(self, tenant: str, conversation_id: str, turn_number: int | None, branch_name: str) -> Record:
        """The head of the branch, or the newest snapshot that a turn on it left behind."""
        ids.check_conversation_id(conversation_id)
        ids.check_branch_name(branch_name)
        space = self.space(tenant)
        order: dict[str, tuple[float, int]] = {}
        for record in self._shared.catalogue.conversation(space, conversation_id):
            manifest = record.manifest
            if manifest.branch_name == branch_name and turn_number in (None, manifest.turn_number):
                order[manifest.snapshot_id] = (manifest.created, rank(manifest.boundary))
        heads = []
        for tier in reversed(self._shared.tiers):
            try:
                with tier.reading():
                    stored = tier.repository.read_ref(space, conversation_id, branch_name)
            except SnapshotError:
                continue
            if stored is None or stored.ref is None:
                continue
            for entry in stored.ref.entries:
                if turn_number in (None, entry.turn_number):
                    order.setdefault(entry.snapshot_id, (ids.id_time(entry.snapshot_id), rank(entry.boundary)))
            if turn_number is None:
                heads.append(stored.ref.head)
            break  # the shared store's word counts
        newest = sorted(order, key=lambda snapshot_id: order[snapshot_id], reverse=True)
        for snapshot_id in (*self._preferred(space, heads, newest), *newest):
            with suppress(NotFound):
                record = self.lookup(tenant, snapshot_id)
                # user_start lies before what the turn asked: who names the turn must not get a memory without it.
                if record.manifest.boundary != "user_start":
                    return record
        what = "" if turn_number is None else f", turn {turn_number}"
        raise NotFound(f"conversation {conversation_id!r}{what} has no snapshot on branch {branch_name!r}")

    def _preferred(self, space: Space, heads: list[str], newest: list[str]) -> list[str]:
        """The durable head, unless this process holds something newer that is not durable yet."""
        if not newest:
            return heads
        first = self._shared.catalogue.get(space, newest[0])
        return [newest[0], *heads] if first is not None and not first.tiers else heads

    def _extended(self, record: Record) -> bool:
        """Whether another replica has pinned it, or put its expiry off, since it was read here."""
        authority = self._shared.authority
        if authority is None or authority.name not in record.tiers:
            return False
        with suppress(SnapshotError), authority.reading():
            record.label = authority.repository.read_label(record.space, record.snapshot_id)
        return not record.expired(self._shared.clock())

    def confirmed(self, record: Record) -> bool:
        """Another replica may have deleted it: the authority is asked, and believed when it answers."""
        authority = self._shared.authority
        if authority is None or authority.name not in record.tiers:
            return True
        try:
            with authority.reading():
                authority.repository.store.head(record.space.snapshot(record.snapshot_id))
        except NotFound:
            self.learn_gone(record.space, record.snapshot_id)
            return False
        except SnapshotError:
            return True
        return True

    def ids_newest_first(self, tenant: str, conversation_id: str | None, after: str | None) -> Iterator[str]:
        """Ids in ascending order, which is newest first; `after` excluded. Durable and host-only ones merged."""
        space = self.space(tenant)
        known = self._shared.catalogue.records(space)
        found = {record.snapshot_id for record in known if not record.tiers}
        if conversation_id is not None:
            ids.check_conversation_id(conversation_id)
            for tier in self._shared.tiers:
                with suppress(StoreUnavailable), tier.reading():
                    for ref in tier.repository.read_refs(space, conversation_id):
                        found |= {entry.snapshot_id for entry in ref.entries}
            found |= {record.snapshot_id for record in known if record.manifest.conversation_id == conversation_id}
            yield from sorted(snapshot_id for snapshot_id in found if after is None or snapshot_id > after)
            return
        local = sorted(snapshot_id for snapshot_id in found if after is None or snapshot_id > after)
        for snapshot_id in self._durable_ids(space, after):
            while local and local[0] < snapshot_id:
                yield local.pop(0)
            if local and local[0] == snapshot_id:
                local.pop(0)
            yield snapshot_id
        yield from local

    def _durable_ids(self, space: Space, after: str | None) -> Iterator[str]:
        start = None if after is None else space.snapshot(after)
        for tier in reversed(self._shared.tiers):
            try:
                with tier.reading():
                    for info in tier.repository.objects(space.snapshots(), start):
                        parsed = keys.parse(info.key)
                        if parsed is not None:
                            yield parsed.name
                return
            except StoreUnavailable:
                continue

    # Describing

    def info(self, record: Record, heads: dict[tuple[str, str], str | None] | None = None) -> SnapshotInfo:
        """`heads` remembers the heads of branches for the length of one listing."""
        manifest = record.manifest
        tiers = set(record.tiers)
        if self._on_host(record):
            tiers.add("host")
        return _summary(
            manifest,
            record,
            tuple(t for t in ("host", "disk", "store") if t in tiers),
            self._is_head(record, {} if heads is None else heads),
        )

    def describe(self, space: Space, snapshot_id: str) -> SnapshotInfo:
        """For events: from memory, else from the manifest alone."""
        record = self._shared.catalogue.get(space, snapshot_id)
        if record is not None:
            return self.info(record)
        for tier in reversed(self._shared.tiers):
            with suppress(NotFound):
                opened = tier.repository.open_snapshot(space, snapshot_id)
                return _summary(opened.manifest, None, (tier.name,), False)
        raise NotFound(f"snapshot {snapshot_id} does not exist")

    def content(self, record: Record) -> SnapshotContent:
        manifest = record.manifest
        messages = record.messages
        if messages is None and manifest.tensor("messages") is not None:
            messages = self._read_messages(record)
        tokens = list(record.tokens[: manifest.forwarded])
        return SnapshotContent(
            tokens, list(manifest.pending_ids), messages, manifest.tokenizer_digest, manifest.template_digest
        )

    def _read_messages(self, record: Record) -> bytes | None:
        trouble: SnapshotError = NotFound(f"snapshot {record.snapshot_id} does not exist")
        for tier in self._shared.tiers:
            try:
                opened = self._shared.open(tier, record.space, record.snapshot_id)
                with tier.reading():
                    return tier.repository.read_messages(opened)
            except NotFound:
                continue
            except SnapshotError as error:
                trouble = error
        raise trouble

    def _on_host(self, record: Record) -> bool:
        wanted = [ItemKey(record.space, ref.file, ref.tensor) for ref in record.manifest.pieces]
        if self._shared.layout.states:
            wanted.append(ItemKey(record.space, record.snapshot_id, STATE))
        return bool(wanted) and all(key in self._shared.host for key in wanted)

    def _is_head(self, record: Record, heads: dict[tuple[str, str], str | None]) -> bool:
        manifest = record.manifest
        branch = (manifest.conversation_id, manifest.branch_name)
        if branch not in heads:
            heads[branch] = None
            for tier in reversed(self._shared.tiers):
                if tier.name in record.tiers:
                    with suppress(SnapshotError), tier.reading():
                        stored = tier.repository.read_ref(record.space, *branch)
                        heads[branch] = None if stored is None or stored.ref is None else stored.ref.head
                        break
        return heads[branch] == record.snapshot_id

    # Changing

    def set_head(self, record: Record) -> None:
        """SnapshotError when it is on no durable tier, or the authority is out of reach."""
        authority = self._shared.authority
        if authority is None or authority.name not in record.tiers:
            raise SnapshotError("only a durable snapshot can be made the head; save it first")
        for tier in self._shared.tiers:
            if tier is authority or tier.name in record.tiers:
                with tier.writing():
                    commit.force_head(tier.repository, record.space, record.manifest)

    def relabel(self, record: Record, *, tag: str | None, pin: bool | None, ttl_seconds: int | None) -> None:
        if tag is None and pin is None and ttl_seconds is None:
            return
        known = record.label or Label()
        label = Label(
            record.pinned if pin is None else pin,
            record.tag if tag is None else tag,
            known.expires if ttl_seconds is None else self._shared.clock() + ttl_seconds,
        )
        self.label(record, label)

    def label(self, record: Record, label: Label) -> None:
        """SnapshotError when a tier that has the snapshot cannot be told."""
        for tier in self._shared.tiers:
            if tier.name in record.tiers:
                with tier.writing():
                    tier.repository.write_label(record.space, record.snapshot_id, label)
        record.label = label

    def delete(self, record: Record) -> None:
        """Gone here at once and for good; SnapshotError when a tier could not be told (it is tried again)."""
        self.learn_gone(record.space, record.snapshot_id)
        event_id = ids.new_id(self._shared.clock())
        if self._events is not None:
            self._events.deleted(record.space, event_id, record.snapshot_id)
        self._shared.counters.add("deletes")
        with self._lock:
            self._undone[record.space, record.snapshot_id] = (record, event_id)
        self._finish_deletion(record, event_id)

    def retry_deletion(self, space: Space, snapshot_id: str) -> bool:
        """True when the snapshot was deleted here before and every tier knows it now; False when it never was."""
        with self._lock:
            undone = self._undone.get((space, snapshot_id))
        if undone is None:
            return False
        self._finish_deletion(*undone)
        return True

    def _finish_deletion(self, record: Record, event_id: str) -> None:
        for tier in reversed(self._shared.tiers):
            try:
                self._erase(tier, record.space, record.manifest)
                if tier is self._shared.authority:
                    with tier.writing():
                        tier.repository.write_tombstone(record.space, event_id, [record.snapshot_id])
            except SnapshotError as error:
                raise SnapshotError(f"deleted here, not yet on tier {tier.name}: {public(error)}") from error
        with self._lock:
            self._undone.pop((record.space, record.snapshot_id), None)

    def erase_everywhere(self, record: Record) -> None:
        """A save finished after the snapshot had been deleted."""
        for tier in self._shared.tiers:
            try:
                self._erase(tier, record.space, record.manifest)
            except SnapshotError as error:
                log.warning("deleted snapshot %s stays on tier %s: %s", record.snapshot_id, tier.name, error)

    def _erase(self, tier: Tier, space: Space, manifest: Manifest) -> None:
        with tier.writing():
            if tier.name == "disk":
                with self._quota.exclusive():
                    commit.erase(tier.repository, space, manifest)
            else:
                commit.erase(tier.repository, space, manifest)

    # Being told

    def saved(self, record: Record) -> None:
        if self._events is not None:
            self._events.saved(record.space, record.snapshot_id)

    def learn_gone(self, space: Space, snapshot_id: str) -> None:
        """Deleted, by whomever: forget it, keep it from coming back, free its state."""
        record = self._shared.catalogue.mark_gone(space, snapshot_id)
        self._free_states(space, snapshot_id)
        for ref in () if record is None else record.manifest.pieces:
            if self._shared.catalogue.piece(space, ref.start, ref.chain) is None:
                self._shared.host.remove(ItemKey(space, ref.file, ref.tensor))
        for tier in self._shared.tiers:
            if tier is not self._shared.authority:
                with suppress(SnapshotError):
                    manifest = None if record is None else record.manifest
                    self._erase(tier, space, manifest or self._shared.open(tier, space, snapshot_id).manifest)

    def swept(self, space: Space, snapshot_id: str) -> None:
        """A sweep took it from one tier; the others follow their own copy of the rules."""
        record = self._shared.catalogue.remove(space, snapshot_id)
        if record is not None:
            self._free_states(space, snapshot_id)

    def _free_states(self, space: Space, snapshot_id: str) -> None:
        for tensor in (STATE, START_STATE):
            self._shared.host.remove(ItemKey(space, snapshot_id, tensor))

    def used(self, record: Record) -> None:
        """After a restore: renew the snapshot's age."""
        with self._lock:
            self._active.add(record.space)
        self._refresh(record)

    def poll(self) -> None:
        """Read the tombstones of tenants that were active; finish deletions."""
        with self._lock:
            spaces = list(self._active)
            self._active.clear()
            undone = list(self._undone.values())
        for record, event_id in undone:
            with suppress(SnapshotError):
                self._finish_deletion(record, event_id)
        authority = self._shared.authority
        if authority is None or self._events is None:
            return
        for space in spaces:
            with suppress(SnapshotError):
                self._events.refresh(space, authority)

    def host_only_tips(self) -> list[Record]:
        """The newest snapshot of each branch, where that is not durable."""
        return [record for record in self.tips() if not record.tiers]

    def tips(self) -> list[Record]:
        """The newest snapshot of each branch, where this process wrote it."""
        newest: dict[tuple[Space, str, str], Record] = {}
        for record in self._shared.catalogue.records():
            manifest = record.manifest
            key = (record.space, manifest.conversation_id, manifest.branch_name)
            known = newest.get(key)
            if known is None or _age(known.manifest) < _age(manifest):
                newest[key] = record
        return [record for record in newest.values() if record.own]

    def _refresh(self, record: Record) -> None:
        max_age = self._shared.config.max_age_seconds
        pause = REFRESH_AT_MOST if max_age is None else min(max_age / REFRESH_FRACTION, REFRESH_AT_MOST)
        now = self._shared.clock()
        key = (record.space, record.snapshot_id)
        with self._lock:
            if now - self._refreshed.get(key, record.manifest.created) < pause:
                return
            if len(self._refreshed) > 1 << 16:
                self._refreshed.clear()
            self._refreshed[key] = now
        for tier in self._shared.tiers:
            if tier.name in record.tiers:
                with suppress(SnapshotError), tier.writing():
                    tier.repository.store.touch(record.space.snapshot(record.snapshot_id))


def _age(manifest: Manifest) -> tuple[float, int]:
    return (manifest.created, rank(manifest.boundary))


def _summary(manifest: Manifest, record: Record | None, tiers: tuple[str, ...], is_head: bool) -> SnapshotInfo:
    return SnapshotInfo(
        snapshot_id=manifest.snapshot_id,
        parent_id=manifest.parent_id,
        conversation_id=manifest.conversation_id,
        branch_name=manifest.branch_name,
        turn_number=manifest.turn_number,
        boundary=manifest.boundary,
        tokens=manifest.forwarded,
        pending=len(manifest.pending_ids),
        bytes=manifest.nbytes,
        tiers=tiers,
        created=manifest.created,
        expires=manifest.expires if record is None else record.expires,
        pinned=manifest.pinned if record is None else record.pinned,
        tag=manifest.tag if record is None else record.tag,
        state_abi=manifest.state_abi,
        is_head=is_head,
    )
