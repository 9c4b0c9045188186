"""Bodies and answers of the admin port's /snapshots."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from engram_runtime.server.protocol.common import MAX_INT, Wire
from engram_runtime.server.protocol.responses import Shape
from engram_runtime.server.protocol.snapshots import MAX_TTL_SECONDS


class TakeRequest(Wire):
    """Make a turn's newest snapshot durable, and label it."""

    conversation_id: str
    tenant: str | None = Field(None, description="Default: x-engram-tenant, else the tenant of servers without keys.")
    turn_number: int | None = Field(None, ge=0, le=MAX_INT, description="Default: the newest turn of the branch.")
    branch_name: str = "main"
    tag: str | None = Field(None, min_length=1)
    pin: bool | None = None
    ttl_seconds: int | None = Field(None, ge=1, le=MAX_TTL_SECONDS, description="Seconds from now.")


class ChangeRequest(BaseModel):
    """A field that is left out stays as it is. Here null means something, so it is not as if absent."""

    model_config = Wire.model_config

    pinned: bool | None = Field(None, description="True: retention and expiry pass it by.")
    ttl_seconds: int | None = Field(
        None, ge=1, le=MAX_TTL_SECONDS, description="Seconds from now; null: it does not expire."
    )


class HashedSnapshot(Shape):
    """Tenant, conversation and branch as HMACs under the tenant key. Times are Unix seconds."""

    snapshot_id: str
    tenant_hash: str
    conversation_hash: str | None
    branch_name_hash: str | None
    turn_number: int | None
    boundary: str | None
    tokens: int | None
    bytes: int | None
    created: float | None
    expires: float | None
    pinned: bool | None
    tag: str | None
    parent_id: str | None
    uri: str | None


class AdminSnapshots(Shape):
    snapshots: list[HashedSnapshot]
    next: str | None
    count: int | None
    total_bytes: int | None


class AdminEvent(Shape):
    """Of a deleted snapshot only the id and the tenant are known for sure."""

    kind: Literal["saved", "deleted", "changed"]
    snapshot: HashedSnapshot


class AdminEvents(Shape):
    events: list[AdminEvent]
    next: str
    lost: bool


class Taken(Shape):
    snapshots: list[HashedSnapshot]


class Removed(Shape):
    deleted: bool
    bytes: int
