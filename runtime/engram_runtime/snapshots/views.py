"""Snapshots as an administrator sees them: all tenants, and no name that a user gave.

Tenants, conversations and branches appear as keyed hashes, the ones that object keys are made of. Importing this module
imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

KEEP: Literal["keep"] = "keep"
Kind = Literal["saved", "deleted", "changed"]


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """Times are Unix seconds. Of a deleted snapshot often only the id and the tenant are known: the rest is None."""

    snapshot_id: str
    tenant_hash: str
    conversation_hash: str | None = None
    branch_name_hash: str | None = None
    turn_number: int | None = None
    boundary: str | None = None
    tokens: int | None = None
    bytes: int | None = None
    created: float | None = None
    expires: float | None = None
    pinned: bool | None = None
    tag: str | None = None
    parent_id: str | None = None
    uri: str | None = None


@dataclass(frozen=True, slots=True)
class Census:
    """What the tier whose word counts holds for this model; counted in the background, so up to a minute old."""

    count: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ViewPage:
    items: list[SnapshotView]
    next: str | None  # pass as `after` for the next page; None at the end


@dataclass(frozen=True, slots=True)
class ViewEvent:
    kind: Kind
    snapshot: SnapshotView


@dataclass(frozen=True, slots=True)
class ViewEvents:
    """`lost`: the cursor is of another process or too old. List again; `next` is where to go on after that."""

    events: list[ViewEvent]
    next: str
    lost: bool


@dataclass(frozen=True, slots=True)
class Removed:
    """`tenant` and `conversation_id` as this process knows them, for its own memory only; None if it does not."""

    view: SnapshotView
    tenant: str | None
    conversation_id: str


@dataclass(frozen=True, slots=True)
class SaveOutcomes:
    """Of this process. Times are Unix seconds."""

    last_success_time: float | None = None
    last_failure_time: float | None = None
    last_error: str | None = None


class SnapshotOverview(Protocol):
    """Calls may come from any thread and block. NotFound and ValueError as in types.Snapshots."""

    def page(self, *, limit: int = 100, after: str | None = None) -> ViewPage:
        """All tenants, newest first; 1 <= limit <= 500."""

    def events(self, *, after: str | None = None, limit: int = 500) -> ViewEvents: ...

    def view(self, snapshot_id: str) -> SnapshotView: ...

    def change(
        self, snapshot_id: str, *, pinned: bool | None = None, ttl_seconds: int | Literal["keep"] | None = KEEP
    ) -> SnapshotView:
        """Signed and stored, so it survives this process. `ttl_seconds` None lifts any expiry."""

    def remove(self, snapshot_id: str) -> Removed:
        """Gone in every tier when this returns."""

    def census(self, wait_seconds: float = 2.0) -> Census | None:
        """None while the first count takes longer than that."""

    def outcomes(self) -> SaveOutcomes: ...
