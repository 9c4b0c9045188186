"""The snapshot service's calls over a dictionary: enough for the server's routes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engram_runtime.engine.turns import TurnSpec
from engram_runtime.errors import NotFound
from engram_runtime.snapshots.types import (
    Event,
    EventPage,
    FsckReport,
    Page,
    PrefetchReport,
    SnapshotContent,
    SnapshotInfo,
    SweepReport,
    TierStatus,
)
from engram_runtime.snapshots.views import (
    KEEP,
    Census,
    Removed,
    SaveOutcomes,
    SnapshotView,
    ViewEvent,
    ViewEvents,
    ViewPage,
)


@dataclass
class FakeOverview:
    """Shows the entries of all tenants; a tenant's hash is its name backwards."""

    snapshots: FakeSnapshots

    def _view(self, tenant: str, info: SnapshotInfo) -> SnapshotView:
        return SnapshotView(info.snapshot_id, tenant[::-1], bytes=info.bytes, turn_number=info.turn_number)

    def _find(self, snapshot_id: str) -> tuple[str, SnapshotInfo]:
        for (tenant, found), (info, _) in self.snapshots.entries.items():
            if found == snapshot_id:
                return tenant, info
        raise NotFound(f"snapshot {snapshot_id} does not exist")

    def page(self, *, limit: int = 100, after: str | None = None) -> ViewPage:
        rows = [self._view(tenant, info) for (tenant, _), (info, _) in self.snapshots.entries.items()]
        return ViewPage(rows[:limit], None)

    def events(self, *, after: str | None = None, limit: int = 500) -> ViewEvents:
        start = int(after or 0)
        rows = [ViewEvent("saved", self._view(t, e.info)) for t, e in self.snapshots.log[start:] if e.info is not None]
        return ViewEvents(rows, str(start + len(rows)), after is None)

    def view(self, snapshot_id: str) -> SnapshotView:
        return self._view(*self._find(snapshot_id))

    def change(
        self, snapshot_id: str, *, pinned: bool | None = None, ttl_seconds: int | str | None = KEEP
    ) -> SnapshotView:
        tenant, info = self._find(snapshot_id)
        expires = 1e9 + ttl_seconds if isinstance(ttl_seconds, int) else None
        return replace(self._view(tenant, info), pinned=pinned, expires=expires)

    def remove(self, snapshot_id: str) -> Removed:
        tenant, info = self._find(snapshot_id)
        self.snapshots.delete(tenant, snapshot_id)
        return Removed(self._view(tenant, info), tenant, info.conversation_id)

    def census(self, wait_seconds: float = 2.0) -> Census:
        return Census(len(self.snapshots.entries), 100)

    def outcomes(self) -> SaveOutcomes:
        return SaveOutcomes(1.0, 2.0, "cannot write: http://user:secret@host/x?token=secret is away")


@dataclass
class FakeSnapshots:
    entries: dict[tuple[str, str], tuple[SnapshotInfo, SnapshotContent]] = field(default_factory=dict)
    log: list[tuple[str, Event]] = field(default_factory=list)
    error: Exception | None = None

    @property
    def overview(self) -> FakeOverview:
        return FakeOverview(self)

    def put(self, turn: TurnSpec, snapshot_id: str, boundary: str, ids: list[int], pending: list[int]) -> None:
        info = SnapshotInfo(
            snapshot_id=snapshot_id,
            parent_id=None,
            conversation_id=turn.conversation_id or "",
            branch_name=turn.branch_name,
            turn_number=turn.turn_number or 1,
            boundary=boundary,
            tokens=len(ids),
            pending=len(pending),
            bytes=len(ids) * 100,
            tiers=("host",),
            created=time.time() + len(self.entries) * 1e-6,
            expires=None,
            pinned=turn.pin,
            tag=turn.tag,
            state_abi="fake",
        )
        content = SnapshotContent(ids, pending, turn.messages, turn.tokenizer_digest, turn.template_digest)
        self.entries[turn.tenant, snapshot_id] = (info, content)
        self._event(turn.tenant, "saved", info)

    def _event(self, tenant: str, kind: str, info: SnapshotInfo) -> None:
        cursor = f"{len(self.log) + 1:08d}"
        self.log.append((tenant, Event(cursor, kind, info.snapshot_id, time.time(), info)))

    def _of(self, tenant: str) -> list[SnapshotInfo]:
        if self.error is not None:
            raise self.error
        found = [info for (owner, _), (info, _) in self.entries.items() if owner == tenant]
        return sorted(found, key=lambda info: (-info.turn_number, -info.created))

    def resolve(
        self, tenant: str, conversation_id: str, turn_number: int | None = None, branch_name: str = "main"
    ) -> SnapshotInfo:
        for info in self._of(tenant):
            if (info.conversation_id, info.branch_name) != (conversation_id, branch_name):
                continue
            if turn_number is None or info.turn_number == turn_number:
                return info
        raise NotFound(f"conversation {conversation_id!r} has no such turn")

    def get(self, tenant: str, snapshot_id: str) -> SnapshotInfo:
        if self.error is not None:
            raise self.error
        try:
            return self.entries[tenant, snapshot_id][0]
        except KeyError:
            raise NotFound(f"snapshot {snapshot_id} does not exist") from None

    def content(self, tenant: str, snapshot_id: str) -> SnapshotContent:
        self.get(tenant, snapshot_id)
        return self.entries[tenant, snapshot_id][1]

    def list(
        self,
        tenant: str,
        *,
        conversation_id: str | None = None,
        branch_name: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> Page:
        found = [
            info
            for info in self._of(tenant)
            if conversation_id in (None, info.conversation_id) and branch_name in (None, info.branch_name)
        ]
        start = int(after) if after is not None and after.isdigit() else 0
        if after is not None and not after.isdigit():
            raise ValueError(f"after must be a cursor of this call, got {after!r}")
        end = start + limit
        return Page(found[start:end], str(end) if end < len(found) else None)

    def events(self, tenant: str, *, after: str | None = None, limit: int = 500) -> EventPage:
        events = [event for owner, event in self.log if owner == tenant and event.cursor > (after or "")][:limit]
        return EventPage(events, events[-1].cursor if events else (after or ""))

    def delete(self, tenant: str, snapshot_id: str) -> SnapshotInfo:
        info = self.get(tenant, snapshot_id)
        del self.entries[tenant, snapshot_id]
        self._event(tenant, "deleted", info)
        return info

    def set_head(self, tenant: str, snapshot_id: str) -> SnapshotInfo:
        info = replace(self.get(tenant, snapshot_id), is_head=True)
        self.entries[tenant, snapshot_id] = (info, self.entries[tenant, snapshot_id][1])
        return info

    def prefetch(self, tenant: str, snapshot_id: str) -> PrefetchReport:
        return PrefetchReport(snapshot_id, self.get(tenant, snapshot_id).bytes, 1.5, "disk")

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
        info = self.resolve(tenant, conversation_id, turn_number, branch_name)
        expires = None if ttl_seconds is None else info.created + ttl_seconds
        info = replace(info, tiers=("host", "store"), tag=tag, pinned=bool(pin), expires=expires)
        self.entries[tenant, info.snapshot_id] = (info, self.entries[tenant, info.snapshot_id][1])
        return info

    def fsck(self, *, repair: bool = False) -> Sequence[FsckReport]:
        return [FsckReport("host", len(self.entries), 0, 0, [])]

    def sweep(self) -> SweepReport:
        return SweepReport(0, 0, 0)

    def status(self) -> Sequence[TierStatus]:
        return [TierStatus("host", True, "Ready", "", bytes=123, capacity=1 << 20, objects=len(self.entries))]

    def counters(self) -> dict[str, float]:
        return {"saves": float(len(self.entries))}

    def gathered(self, deadline_seconds: float) -> bool:
        return True

    def flush(self, deadline_seconds: float) -> bool:
        return True

    def close(self) -> None:
        return None
