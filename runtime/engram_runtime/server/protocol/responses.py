"""Shapes of the answers, for the OpenAPI document and for tests; the routes themselves build plain dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Shape):
    error: ErrorDetail


class Engram(Shape):
    """What happened to the turn's memory. Token counts are prompt tokens, times milliseconds."""

    conversation_id: str
    branch_name: str
    turn_number: int
    snapshot_id: str | None
    boundary: str | None
    restored_tokens: int
    prefilled_tokens: int
    rewarmed_tokens: int
    recomputed_tokens: int
    tier: Literal["gpu", "host", "disk", "store"] | None
    bytes: int
    restore_time_ms: float
    restore_failed: bool
    restore_error: str | None
    auto_save: bool


class PromptTokensDetails(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    engram: Engram | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    engram: Engram | None


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Shape):
    prompt: str


class Health(Shape):
    status: str
    reason: str


class Snapshot(Shape):
    """Manifest summary. Times are Unix seconds; `tokens` counts what was forwarded, `pending` what was only sampled."""

    id: str
    object: Literal["snapshot"]
    conversation_id: str
    branch_name: str
    turn_number: int
    boundary: str
    parent: str | None
    tokens: int
    pending: int
    bytes: int
    tiers: list[str]
    created: float
    expires: float | None
    pinned: bool
    tag: str | None
    model: str
    state_abi: str
    is_head: bool


class SnapshotList(Shape):
    object: Literal["list"]
    data: list[Snapshot]
    has_more: bool
    next_after: str | None


class Restored(Shape):
    """What POST /v1/snapshots/{id}/restore did. Bytes are what was moved between tiers, 0 where only the head moved."""

    snapshot: Snapshot
    head: bool
    bytes: int
    milliseconds: float
    tier: str | None


class Deleted(Shape):
    id: str
    object: Literal["snapshot.deleted"]
    deleted: Literal[True]


class SnapshotEvent(Shape):
    cursor: str
    kind: Literal["saved", "deleted"]
    snapshot_id: str
    time: float
    snapshot: Snapshot | None


class SnapshotEvents(Shape):
    data: list[SnapshotEvent]
    cursor: str
