"""Bodies and answers of the original Engram server's five snapshot calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engram_runtime.server.protocol.common import MAX_INT, Wire
from engram_runtime.server.protocol.completions import MAX_TOKENS
from engram_runtime.server.protocol.responses import Engram, ErrorDetail, Shape

TurnNumber = Annotated[int, Field(ge=0, le=MAX_INT)]


class LegacySave(Wire):
    """Make a turn's newest snapshot durable."""

    conversation_id: str | None = None
    rid: str | None = Field(None, description="Stands for conversation_id where that is absent.")
    turn_number: TurnNumber | None = Field(None, description="Default: the newest turn of the branch.")
    branch_name: str | None = Field(None, description="Default main.")
    snapshot_id: str | None = Field(None, description="A name for the snapshot: kept as its tag.")


class LegacyRestore(Wire):
    """Fetch a turn, or continue it: then continuation_ids and max_new_tokens are required."""

    conversation_id: str | None = None
    rid: str | None = Field(None, description="Stands for conversation_id where that is absent.")
    turn_number: TurnNumber | None = Field(None, description="Default: the newest turn of the branch.")
    branch_name: str | None = Field(None, description="Default main.")
    create_new_request: bool = False
    continuation_ids: list[Annotated[int, Field(ge=0, le=MAX_INT)]] | None = Field(
        None, max_length=MAX_TOKENS, description="Token ids that follow what was said; may be empty."
    )
    max_new_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    request_id: str | None = Field(None, min_length=1, max_length=256, description="Comes back as rid.")
    temperature: float = Field(0.0, ge=0, le=2, description="0, the default, is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_INT)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _generates_or_not(self) -> LegacyRestore:
        for name in ("continuation_ids", "max_new_tokens"):
            if self.create_new_request and getattr(self, name) is None:
                raise ValueError(f"{name} is required with create_new_request")
        if not self.create_new_request:
            only = {"continuation_ids", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos"}
            for name in sorted(only & self.model_fields_set):
                raise ValueError(f"{name} needs create_new_request: nothing is generated without it")
        return self


class LegacyList(Wire):
    conversation_id: str


class LegacyTurn(Wire):
    """One of turn_number and branch_name is required."""

    conversation_id: str
    turn_number: TurnNumber | None = None
    branch_name: str | None = None

    @model_validator(mode="after")
    def _names_something(self) -> LegacyTurn:
        if self.turn_number is None and self.branch_name is None:
            raise ValueError("turn_number or branch_name is required")
        return self


class LegacySaved(Shape):
    success: Literal[True]
    snapshot_id: str
    message: str


class LegacyRestored(Shape):
    """`token_count`: tokens of the snapshot. `bytes` and `restore_time_ms`: what fetching it moved and took."""

    success: Literal[True]
    rid: str
    mamba_pool_idx: None
    message: str
    token_count: int
    output_ids: list[int] | None
    output_text: str | None
    finish_reason: Literal["stop", "length"] | None
    snapshot_id: str
    turn_number: int
    tier: str
    bytes: int
    restore_time_ms: float
    engram: Engram | None


class LegacyMetadata(Shape):
    """A turn as it ended. Fields that describe the original's pools are null."""

    conversation_id: str
    turn_number: int
    timestamp: float
    token_count: int
    model_name: str
    mamba_pool_idx: None
    req_pool_idx: None
    layer_config: None
    active_tool_context: None
    branch_name: str | None
    parent_snapshot: str | None
    fill_ids: list[int] | None
    snapshot_id: str
    boundary: str
    created_at: str
    size_bytes: int
    tier: str


class LegacySnapshots(Shape):
    success: Literal[True]
    snapshots: list[LegacyMetadata]


class LegacyInfo(Shape):
    success: Literal[True]
    metadata: LegacyMetadata


class LegacyDeleted(Shape):
    success: Literal[True]
    message: str
    deleted: int


class LegacyError(Shape):
    """Both forms at once: what the original's clients read, and the object that every other call has."""

    success: Literal[False]
    message: str
    error: ErrorDetail


def failure(body: dict[str, Any]) -> dict[str, Any]:
    """The error object of any call as LegacyError."""
    return {"success": False, "message": body["error"]["message"], **body}
