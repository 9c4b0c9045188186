"""What the snapshot calls return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SaveSnapshotResponse:
    """A snapshot that is durable now."""

    conversation_id: str
    turn_number: int
    snapshot_id: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RestoreSnapshotResponse:
    """A restore that moved bytes: `size_bytes` of them in `restore_time_ms`."""

    conversation_id: str
    turn_number: int
    restore_time_ms: float
    snapshot_id: str = ""
    size_bytes: int | None = None
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """One snapshot. `created_at` and `expires_at` are Unix seconds, `tier` is the fastest tier that holds it."""

    conversation_id: str
    turn_number: int
    snapshot_id: str
    created_at: float | None = None
    size_bytes: int | None = None
    tier: str | None = None
    branch_name: str = "main"
    boundary: str | None = None
    tokens: int | None = None
    tiers: tuple[str, ...] = field(default=())
    expires_at: float | None = None
    parent_id: str | None = None
    pinned: bool = False
    tag: str | None = None
    model: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SnapshotMetadata:
        """From the server's manifest summary. ValueError when it is not one."""
        snapshot_id = data.get("id")
        if not isinstance(snapshot_id, str) or not isinstance(data.get("conversation_id"), str):
            raise ValueError("the answer is not a snapshot")
        tiers = data.get("tiers") or ()
        tiers = tuple(str(tier) for tier in tiers) if isinstance(tiers, (list, tuple)) else ()
        return cls(
            conversation_id=data["conversation_id"],
            turn_number=int(data.get("turn_number") or 0),
            snapshot_id=snapshot_id,
            created_at=data.get("created"),
            size_bytes=data.get("bytes"),
            tier=tiers[0] if tiers else None,
            branch_name=str(data.get("branch_name") or "main"),
            boundary=data.get("boundary"),
            tokens=data.get("tokens"),
            tiers=tiers,
            expires_at=data.get("expires"),
            parent_id=data.get("parent"),
            pinned=bool(data.get("pinned")),
            tag=data.get("tag"),
            model=data.get("model"),
        )


@dataclass(frozen=True, slots=True)
class DeleteSnapshotResponse:
    """`deleted` is true when `count` > 0 snapshots are gone from every tier."""

    conversation_id: str
    turn_number: int | None = None
    deleted: bool = True
    count: int = 0
