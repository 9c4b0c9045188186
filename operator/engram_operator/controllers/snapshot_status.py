"""Status of a Snapshot from what the store says: pure functions.

A status is written whole, and only where it differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from engram_operator.engines import EnginePod, EngineStatus, StoredSnapshot
from engram_operator.resources.policy import SnapshotPolicy
from engram_operator.resources.snapshot import HASH_DIGITS
from engram_operator.status.pods import parse_time

Status = dict[str, Any]
MAX_BOUNDARIES = 16
MAX_ERROR = 1024
FIRST_RETRY_S = 2.0
LAST_RETRY_S = 300.0  # nobody can hurry a bucket's rights; a person who mends them waits no longer than this

_BOUNDARIES = {
    "user_start": "UserStart",
    "history": "History",
    "turn_end": "TurnEnd",
    "next_history": "NextHistory",
    "manual": "Manual",
}
FINAL_PHASES = frozenset({"Ready", "Failed", "Expired"})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where it was read: what a restore or a deletion needs when model and policy are gone."""

    policy: SnapshotPolicy | None
    engine: EngineStatus | None
    pod: EnginePod | None = None  # the one that took it, where that is known


def tip(records: Iterable[StoredSnapshot]) -> StoredSnapshot:
    """The boundary that stands for a turn: the one with most tokens, the newest of equals."""
    return max(records, key=lambda record: (record.tokens, record.created, record.snapshot_id))


def stored(
    records: Sequence[StoredSnapshot],
    before: Mapping[str, Any],
    *,
    generation: int,
    branch: str | None,
    origin: Origin,
    now: datetime,
) -> Status:
    """Ready: all of one turn that the store holds. `branch` as the user wrote it, None for its hash."""
    newest = tip(records)
    since = before.get("completionTime") or stamp(now)
    status: Status = {
        "observedGeneration": generation,
        "phase": "Ready",
        "readyToUse": True,
        "snapshotID": newest.snapshot_id,
        "conversationHash": newest.conversation_hash[:HASH_DIGITS],
        "turn": newest.turn_number,
        "tokens": newest.tokens,
        "sizeBytes": newest.bytes,
        "size": human(newest.bytes),
        "creationTime": stamp(datetime.fromtimestamp(newest.created, UTC)),
        "completionTime": since,
        "boundaries": [
            {"snapshotID": record.snapshot_id, "boundary": record.boundary, "tokens": record.tokens}
            for record in sorted(records, key=lambda record: (-record.created, record.snapshot_id))[:MAX_BOUNDARIES]
        ],
        "conditions": [condition(before, "Ready", True, "Stored", "", generation, now)],
    }
    optional = {
        "parentID": newest.parent_id,
        "branch": branch or (newest.branch_name_hash or "")[:HASH_DIGITS],
        "boundary": _BOUNDARIES.get(newest.boundary),
        "uri": shown_uri(newest.uri, origin.policy),
        "expirationTime": None if newest.expires is None else stamp(datetime.fromtimestamp(newest.expires, UTC)),
        "capturedBy": before.get("capturedBy") if origin.pod is None else _captured_by(origin.pod, origin.engine),
        "compatibility": _compatibility(origin.engine) or before.get("compatibility"),
        "storage": _storage(origin.policy) or before.get("storage"),
    }
    return status | {name: value for name, value in optional.items() if value}


def pending(before: Mapping[str, Any], phase: str, reason: str, message: str, generation: int, now: datetime) -> Status:
    """Not stored yet, and no error: what it waits for."""
    kept = {name: before[name] for name in ("error",) if name in before}
    return kept | {
        "observedGeneration": generation,
        "phase": phase,
        "readyToUse": False,
        "conditions": [condition(before, "Ready", False, reason, message, generation, now)],
    }


def failed(
    before: Mapping[str, Any],
    reason: str,
    message: str,
    generation: int,
    now: datetime,
    *,
    phase: str,
    kind: str = "Ready",
) -> Status:
    """One more attempt that came to nothing. `kind`: the condition that tells of it."""
    attempts = int((before.get("error") or {}).get("attempts", 0)) + 1
    others = [entry for entry in before.get("conditions") or () if entry["type"] not in (kind, "Ready")]
    ready_reason = reason if kind == "Ready" else phase
    conditions = [condition(before, "Ready", False, ready_reason, message, generation, now), *others]
    if kind != "Ready":
        conditions.append(condition(before, kind, False, reason, message, generation, now))
    return dict(before) | {
        "observedGeneration": generation,
        "phase": phase,
        "readyToUse": False,
        "error": {"message": message[:MAX_ERROR], "time": stamp(now), "attempts": attempts},
        "conditions": conditions,
    }


def gone(before: Mapping[str, Any], generation: int, now: datetime) -> Status:
    """The store has it no more: Expired where that was its time, else Failed with DataLost."""
    expires = parse_time(before.get("expirationTime"))
    phase, reason, message = "Failed", "DataLost", "the store does not hold it any more"
    if expires is not None and expires <= now:
        phase, reason, message = "Expired", "Expired", f"its time ended at {before['expirationTime']}"
    return dict(before) | {
        "observedGeneration": generation,
        "phase": phase,
        "readyToUse": False,
        "conditions": [condition(before, "Ready", False, reason, message, generation, now)],
    }


def deleting(before: Mapping[str, Any], message: str, generation: int, now: datetime) -> Status:
    others = [entry for entry in before.get("conditions") or () if entry["type"] != "Ready"]
    return {name: value for name, value in before.items() if name != "error"} | {
        "observedGeneration": generation,
        "phase": "Deleting",
        "readyToUse": False,
        "conditions": [condition(before, "Ready", False, "Deleting", message, generation, now), *others],
    }


def condition(
    before: Mapping[str, Any], kind: str, ok: bool, reason: str, message: str, generation: int, now: datetime
) -> dict[str, Any]:
    """lastTransitionTime moves only when the status flips."""
    word = "True" if ok else "False"
    old: Mapping[str, Any] = next((e for e in before.get("conditions") or () if e["type"] == kind), {})
    changed = old.get("status") != word
    return {
        "type": kind,
        "status": word,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": stamp(now) if changed else old["lastTransitionTime"],
    }


def wait_left(status: Mapping[str, Any], now: datetime) -> float:
    """Seconds until the next attempt may be made: every write of a status is an event, and must not be one."""
    error = status.get("error") or {}
    at = parse_time(error.get("time"))
    if at is None:
        return 0.0
    delay = min(LAST_RETRY_S, FIRST_RETRY_S ** min(int(error.get("attempts", 1)), 16))
    return max(0.0, (at + timedelta(seconds=delay) - now).total_seconds())


def shown_uri(uri: str | None, policy: SnapshotPolicy | None) -> str | None:
    """As the policy names the place: a claim is a folder only inside a pod."""
    if uri is None or policy is None or policy.storage.uri.scheme != "pvc" or not uri.startswith("file://"):
        return uri
    found = uri.find("/v1/")
    return policy.storage.uri.text.rstrip("/") + (uri[found:] if found >= 0 else "")


def human(size: int) -> str:
    """For the column: `812B`, `4.1Ki`, `1.5Gi`."""
    value = float(size)
    for unit in ("B", "Ki", "Mi", "Gi", "Ti", "Pi"):
        if value < 1024 or unit == "Pi":
            return f"{size}B" if unit == "B" else f"{value:.1f}{unit}"
        value /= 1024
    raise AssertionError("unreachable")


def stamp(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _captured_by(pod: EnginePod, engine: EngineStatus | None) -> dict[str, str]:
    found = {"podName": pod.name, "podUID": pod.uid}
    if engine is not None and engine.version:
        found["engineVersion"] = engine.version
    return found


def _compatibility(engine: EngineStatus | None) -> dict[str, str] | None:
    if engine is None:
        return None
    facts = {"stateABI": engine.state_abi, "modelDigest": engine.model_digest}
    return {name: value for name, value in facts.items() if value}


def _storage(policy: SnapshotPolicy | None) -> dict[str, Any] | None:
    if policy is None or policy.storage.uri.scheme != "s3":
        return None
    storage = policy.storage
    found: dict[str, Any] = {"region": storage.region, "forcePathStyle": storage.force_path_style}
    if storage.endpoint_url:
        found["endpointURL"] = storage.endpoint_url
    if storage.credentials is not None:
        found["credentialsSecretName"] = storage.credentials.secret
    return found
