"""Answers of engines to values. What is not exactly as it must be is refused: a pod may be anybody's.

A bad record in a list is left out and counted, so that one cannot hide the others; anything else that cannot be read
raises EngineAnswerError, which no caller takes for a fact about the store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engram_operator.engines.errors import EngineAnswerError
from engram_operator.engines.types import (
    EngineStatus,
    EventPage,
    SnapshotCounts,
    SnapshotEvent,
    SnapshotPage,
    StoreCondition,
    StoredSnapshot,
    SweepReport,
    Waiting,
    WaitingByModel,
)

MAX_INT = 2**63 - 1
MAX_TURN = 2**31 - 1
MAX_TIME = 253402300799.0  # the last second of the year 9999, the last that an API server can write
MAX_MESSAGE = 512
MAX_MODELS = 10_000
MAX_EVENTS = 500

_ID = re.compile(r"[0-9a-f]{32}")
_HASH = re.compile(r"[0-9a-f]{10,64}")
_BOUNDARY = re.compile(r"[a-z_]{1,32}")
_DIGEST = re.compile(r"[A-Za-z0-9:._-]{1,128}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.:+/-]{0,127}")
_REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
_CURSOR = re.compile(r"[\x21-\x7e]{1,512}")
# No user name, no query: neither belongs in a status that others may read.
_URI = re.compile(r"(s3|file)://[^\s?#@\x00-\x1f\x7f]{1,2000}")
_QUERY = re.compile(r"\?[^\s\"']+")
_USERINFO = re.compile(r"://[^\s/@]+@")
_SECRET = re.compile(
    r"(?i)\b(authorization|bearer|access[-_ ]?key(?:[-_ ]?id)?|secret|token|password|signature)(\s*[:=]\s*|\s+)\S+"
)


def clean(text: object, limit: int = MAX_MESSAGE) -> str:
    """Somebody else's words, fit for a condition: one line, bounded, without query strings and credentials."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    line = _SECRET.sub(r"\1\2[redacted]", _USERINFO.sub("://", _QUERY.sub("", line)))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def reason(value: object) -> str:
    """A word that a condition may carry as its reason; StoreUnavailable for anything else."""
    return value if isinstance(value, str) and _REASON.fullmatch(value) else "StoreUnavailable"


def snapshot(value: Any) -> StoredSnapshot:
    record = _mapping(value, "snapshot")
    return StoredSnapshot(
        snapshot_id=_match(record, "snapshot_id", _ID),
        tenant_hash=_match(record, "tenant_hash", _HASH),
        conversation_hash=_match(record, "conversation_hash", _HASH),
        branch_name_hash=_optional_match(record, "branch_name_hash", _HASH),
        turn_number=_integer(record, "turn_number", MAX_TURN),
        boundary=_match(record, "boundary", _BOUNDARY),
        tokens=_integer(record, "tokens"),
        bytes=_integer(record, "bytes"),
        created=_time(record, "created"),
        expires=_optional_time(record, "expires"),
        pinned=_boolean(record, "pinned"),
        tag=_optional_text(record, "tag", 128),
        parent_id=_optional_match(record, "parent_id", _ID),
        uri=_optional_match(record, "uri", _URI),
    )


def page(value: Any, limit: int) -> SnapshotPage:
    body = _mapping(value, "answer")
    found, unreadable = _records(_list(body, "snapshots", limit))
    return SnapshotPage(
        snapshots=tuple(found),
        next=_optional_match(body, "next", _CURSOR),
        count=_optional_integer(body, "count"),
        total_bytes=_optional_integer(body, "total_bytes"),
        unreadable=unreadable,
    )


def saved(value: Any, limit: int) -> tuple[StoredSnapshot, ...]:
    """The answer to a save: at least one snapshot, all of them readable."""
    found = tuple(snapshot(record) for record in _list(_mapping(value, "answer"), "snapshots", limit))
    if not found:
        raise EngineAnswerError("snapshots: must not be empty")
    return found


def events(value: Any, limit: int) -> EventPage:
    body = _mapping(value, "answer")
    found: list[SnapshotEvent] = []
    unreadable = 0
    for entry in _list(body, "events", limit):
        try:
            found.append(_event(entry))
        except EngineAnswerError:
            unreadable += 1
    return EventPage(tuple(found), _match(body, "next", _CURSOR), _boolean(body, "lost"), unreadable)


def status(value: Any) -> EngineStatus:
    body = _mapping(value, "answer")
    model, requests = _part(body, "model"), _part(body, "requests")
    store, counts = body.get("store"), body.get("snapshots")
    return EngineStatus(
        phase=_match(body, "phase", _WORD),
        state_abi=_optional_match(body, "state_abi", _DIGEST),
        model_digest=_optional_match(model, "digest", _DIGEST),
        architecture=_optional_match(model, "architecture", _WORD),
        weight_bytes=_optional_integer(model, "weight_bytes"),
        state_bytes=_optional_integer(body, "state_bytes"),
        running=_optional_integer(requests, "running") or 0,
        waiting=_optional_integer(requests, "waiting") or 0,
        idle_seconds=_optional_seconds(body, "idle_seconds"),
        version=_optional_match(body, "version", _WORD),
        dtype=_optional_match(model, "dtype", _WORD),
        store=None if store is None else _store(store),
        snapshots=None if counts is None else _counts(counts),
    )


def sweep(value: Any) -> SweepReport:
    body = _mapping(value, "answer")
    names = ("snapshots_deleted", "files_deleted", "bytes_deleted")
    return SweepReport(*(_integer(body, name) for name in names))


def deleted(value: Any) -> int:
    """Bytes that a deletion frees, as the engine counts them."""
    body = _mapping(value, "answer")
    if body.get("deleted") is not True:
        raise EngineAnswerError("deleted: must be true")
    return _integer(body, "bytes") if "bytes" in body else 0


def waiting(value: Any) -> WaitingByModel:
    models = _mapping(_mapping(value, "answer").get("models"), "models")
    if len(models) > MAX_MODELS:
        raise EngineAnswerError(f"models: must be <= {MAX_MODELS} entries, got {len(models)}")
    found = {}
    for name, entry in models.items():
        record = _mapping(entry, "models")
        found[name] = Waiting(_integer(record, "waiting"), _optional_seconds(record, "oldest_seconds") or 0.0)
    return found


def _event(value: Any) -> SnapshotEvent:
    entry = _mapping(value, "event")
    kind, about = entry.get("kind"), entry.get("snapshot")
    if kind not in ("saved", "deleted", "changed"):
        raise EngineAnswerError("kind: must be saved, deleted or changed")
    try:
        found = snapshot(about)
    except EngineAnswerError:
        if kind != "deleted":
            raise
        # What is gone can often not be described any more: its id is enough.
        source = about if isinstance(about, Mapping) and "snapshot_id" in about else entry
        return SnapshotEvent("deleted", _match(source, "snapshot_id", _ID), None)
    return SnapshotEvent(kind, found.snapshot_id, found)


def _records(values: list[Any]) -> tuple[list[StoredSnapshot], int]:
    found, unreadable = [], 0
    for value in values:
        try:
            found.append(snapshot(value))
        except EngineAnswerError:
            unreadable += 1
    return found, unreadable


def _store(value: Any) -> StoreCondition:
    record = _mapping(value, "store")
    message = clean(record.get("message") or "")
    return StoreCondition(_boolean(record, "reachable"), reason(record.get("reason")), message)


def _counts(value: Any) -> SnapshotCounts:
    record = _mapping(value, "snapshots")
    error = record.get("last_error")
    return SnapshotCounts(
        count=_optional_integer(record, "count"),
        total_bytes=_optional_integer(record, "total_bytes"),
        last_success_time=_optional_time(record, "last_success_time"),
        last_failure_time=_optional_time(record, "last_failure_time"),
        last_error=None if error is None else clean(error),
    )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise EngineAnswerError(f"{where}: must be an object")
    return value


def _part(record: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = record.get(field)
    return value if isinstance(value, Mapping) else {}


def _list(record: Mapping[str, Any], field: str, limit: int) -> list[Any]:
    value = record.get(field)
    if not isinstance(value, list):
        raise EngineAnswerError(f"{field}: must be a list")
    if len(value) > limit:
        raise EngineAnswerError(f"{field}: must be <= {limit} items, got {len(value)}")
    return value


def _match(record: Mapping[str, Any], field: str, pattern: re.Pattern[str]) -> str:
    value = record.get(field)
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise EngineAnswerError(f"{field}: missing, or not of the form it must have")
    return value


def _optional_match(record: Mapping[str, Any], field: str, pattern: re.Pattern[str]) -> str | None:
    return None if record.get(field) is None else _match(record, field, pattern)


def _optional_text(record: Mapping[str, Any], field: str, limit: int) -> str | None:
    value = record.get(field)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise EngineAnswerError(f"{field}: must be at most {limit} printable characters")
    return value


def _integer(record: Mapping[str, Any], field: str, limit: int = MAX_INT) -> int:
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise EngineAnswerError(f"{field}: must be an integer from 0 to {limit}")
    return value


def _optional_integer(record: Mapping[str, Any], field: str) -> int | None:
    return None if record.get(field) is None else _integer(record, field)


def _number(record: Mapping[str, Any], field: str, limit: float) -> float:
    value = record.get(field)
    # The comparison is false for NaN too, and needs no conversion that a huge integer would overflow.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise EngineAnswerError(f"{field}: must be a number from 0 to {limit}")
    return float(value)


def _time(record: Mapping[str, Any], field: str) -> float:
    return _number(record, field, MAX_TIME)


def _optional_time(record: Mapping[str, Any], field: str) -> float | None:
    return None if record.get(field) is None else _time(record, field)


def _optional_seconds(record: Mapping[str, Any], field: str) -> float | None:
    return None if record.get(field) is None else _number(record, field, MAX_TIME)


def _boolean(record: Mapping[str, Any], field: str) -> bool:
    value = record.get(field)
    if not isinstance(value, bool):
        raise EngineAnswerError(f"{field}: must be true or false")
    return value
