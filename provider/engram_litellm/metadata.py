"""The `engram` object of a response: what the server measured, under the names that applications read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngramStateMetadata:
    """What happened to the conversation's state in one call. Token counts and times are the server's own.

    `tokens_saved` is `restored_tokens`: prompt tokens that were not computed. `restore_failed` says that the answer
    was computed without the state that should have been used, `restore_error` why.
    """

    conversation_id: str = ""
    turn_number: int = 0
    snapshot_id: str | None = None
    tokens_saved: int = 0
    restore_time_ms: float | None = None
    restore_failed: bool = False
    restore_error: str | None = None
    auto_save: bool = True
    branch_name: str | None = None
    boundary: str | None = None
    restored_tokens: int = 0
    prefilled_tokens: int | None = None
    rewarmed_tokens: int | None = None
    tier: str | None = None
    bytes: int | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngramStateMetadata:
        """From an `engram` object; fields that are missing or of the wrong type keep their defaults."""
        restored = _integer(data.get("restored_tokens")) or 0
        return cls(
            conversation_id=_text(data.get("conversation_id")) or "",
            turn_number=_integer(data.get("turn_number")) or 0,
            snapshot_id=_text(data.get("snapshot_id")),
            tokens_saved=restored,
            restore_time_ms=_number(data.get("restore_time_ms")),
            restore_failed=data.get("restore_failed") is True,
            restore_error=_text(data.get("restore_error")),
            auto_save=data.get("auto_save") is not False,
            branch_name=_text(data.get("branch_name")),
            boundary=_text(data.get("boundary")),
            restored_tokens=restored,
            prefilled_tokens=_integer(data.get("prefilled_tokens")),
            rewarmed_tokens=_integer(data.get("rewarmed_tokens")),
            tier=_text(data.get("tier")),
            bytes=_integer(data.get("bytes")),
        )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
