"""What engines answer, after every field was checked (parse.py). Sizes in bytes, times in Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """One boundary that the store holds. Hashes are HMACs under the tenant's key, never a user's own words."""

    snapshot_id: str
    tenant_hash: str
    conversation_hash: str
    branch_name_hash: str | None
    turn_number: int
    boundary: str  # user_start | history | turn_end | next_history | manual, or a kind that is newer than this operator
    tokens: int
    bytes: int
    created: float
    expires: float | None
    pinned: bool
    tag: str | None
    parent_id: str | None
    uri: str | None  # None: kept in the replica's own tiers only


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """Newest first. `count` and `total_bytes` are of everything, not of this page; None until the engine counted."""

    snapshots: tuple[StoredSnapshot, ...]
    next: str | None
    count: int | None
    total_bytes: int | None
    unreadable: int = 0  # records left out because a field of theirs was not what it must be


@dataclass(frozen=True, slots=True)
class SnapshotEvent:
    kind: Literal["saved", "deleted", "changed"]
    snapshot_id: str
    snapshot: StoredSnapshot | None  # may be missing where kind is "deleted"


@dataclass(frozen=True, slots=True)
class EventPage:
    """Oldest first. `lost`: the cursor was too old, so the list must be read again."""

    events: tuple[SnapshotEvent, ...]
    next: str
    lost: bool
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A conversation to save now. `turn_number` None: its newest turn."""

    conversation_id: str
    branch_name: str | None = None
    turn_number: int | None = None
    tenant: str | None = None
    pin: bool = False
    tag: str | None = None
    ttl_seconds: int | None = None

    def body(self) -> dict[str, Any]:
        """Only what is set: the engine's own defaults hold for the rest."""
        body: dict[str, Any] = {"conversation_id": self.conversation_id}
        optional = {
            "branch_name": self.branch_name,
            "turn_number": self.turn_number,
            "tenant": self.tenant,
            "pin": self.pin or None,
            "tag": self.tag,
            "ttl_seconds": self.ttl_seconds,
        }
        return body | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StoreCondition:
    """The durable tier as the engine sees it."""

    reachable: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class SnapshotCounts:
    """None: not counted yet, or it never happened."""

    count: int | None
    total_bytes: int | None
    last_success_time: float | None
    last_failure_time: float | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """GET /status. None: the engine did not say (it is loading, or has no store)."""

    phase: str
    state_abi: str | None
    model_digest: str | None
    architecture: str | None
    weight_bytes: int | None
    state_bytes: int | None
    running: int
    waiting: int
    idle_seconds: float | None
    version: str | None
    dtype: str | None
    store: StoreCondition | None
    snapshots: SnapshotCounts | None


@dataclass(frozen=True, slots=True)
class SweepReport:
    snapshots_deleted: int
    files_deleted: int
    bytes_deleted: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests that an activator holds for a model that sleeps."""

    waiting: int
    oldest_seconds: float


WaitingByModel = Mapping[str, Waiting]
