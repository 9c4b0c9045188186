"""The snapshot calls as plain steps, so that the sync and the async client share everything but the waiting.

Each operation is a generator: it yields a `Request`, is sent the decoded answer, and returns its result. The five
methods name snapshots as the original server did, by conversation and turn; the server names them by id, so restoring,
reading and deleting look the id up first.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from engram_litellm.errors import SnapshotError
from engram_litellm.snapshot_types import (
    DeleteSnapshotResponse,
    RestoreSnapshotResponse,
    SaveSnapshotResponse,
    SnapshotMetadata,
)

PAGE = 100
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP call below /v1."""

    method: str
    path: str
    params: Mapping[str, str] | None = None
    json: Mapping[str, Any] | None = None


Steps = Generator[Request, Any, _T]


def save(
    conversation_id: str,
    turn_number: int | None,
    branch_name: str | None,
    tag: str | None,
    pin: bool | None,
    ttl: int | None,
) -> Steps[SaveSnapshotResponse]:
    """Make the newest snapshot of a conversation (or turn) durable now."""
    body = {
        "conversation_id": conversation_id,
        "turn_number": turn_number,
        "branch_name": branch_name,
        "tag": tag,
        "pin": pin,
        "ttl": ttl,
    }
    answer = yield Request("POST", "/snapshots", json={key: value for key, value in body.items() if value is not None})
    saved = SnapshotMetadata.from_dict(answer)
    return SaveSnapshotResponse(saved.conversation_id, saved.turn_number, saved.snapshot_id, saved.size_bytes)


def list_all(conversation_id: str, branch_name: str | None, limit: int | None) -> Steps[list[SnapshotMetadata]]:
    """Snapshots of a conversation, newest first, over as many pages as it takes."""
    out: list[SnapshotMetadata] = []
    after: str | None = None
    while limit is None or len(out) < limit:
        count = PAGE if limit is None else min(PAGE, limit - len(out))
        params = {"conversation_id": conversation_id, "limit": str(count)}
        if branch_name is not None:
            params["branch_name"] = branch_name
        if after is not None:
            params["after"] = after
        answer = yield Request("GET", "/snapshots", params=params)
        items = answer.get("data")
        if not isinstance(items, list):
            raise ValueError("the answer is not a list of snapshots")
        out.extend(SnapshotMetadata.from_dict(item) for item in items)
        following = answer.get("next_after")
        if not items or not following or following == after:
            break
        after = str(following)
    return out


def find(conversation_id: str, turn_number: int | None, branch_name: str | None) -> Steps[SnapshotMetadata]:
    """The newest snapshot of a turn, or of a branch (default main). SnapshotError 404 when there is none."""
    found = yield from list_all(conversation_id, branch_name or "main", 1 if turn_number is None else None)
    for snapshot in found:
        if turn_number is None or snapshot.turn_number == turn_number:
            return snapshot
    what = "no snapshot" if turn_number is None else f"no snapshot of turn {turn_number}"
    raise SnapshotError(f"conversation {conversation_id!r} has {what}", conversation_id, 404)


def restore(conversation_id: str, turn_number: int | None, branch_name: str | None) -> Steps[RestoreSnapshotResponse]:
    """Make a snapshot the head of its branch and bring it to host memory; bytes and milliseconds are the server's."""
    snapshot = yield from find(conversation_id, turn_number, branch_name)
    path = f"/snapshots/{quote(snapshot.snapshot_id, safe='')}/restore"
    yield Request("POST", path, json={"action": "head"})
    moved = yield Request("POST", path, json={"action": "prefetch"})
    return RestoreSnapshotResponse(
        snapshot.conversation_id,
        snapshot.turn_number,
        float(moved.get("milliseconds") or 0.0),
        snapshot.snapshot_id,
        moved.get("bytes"),
        moved.get("tier"),
    )


def info(conversation_id: str, turn_number: int | None, branch_name: str | None) -> Steps[SnapshotMetadata]:
    """The manifest summary of a turn's newest snapshot."""
    snapshot = yield from find(conversation_id, turn_number, branch_name)
    answer = yield Request("GET", f"/snapshots/{quote(snapshot.snapshot_id, safe='')}")
    return SnapshotMetadata.from_dict(answer)


def delete(conversation_id: str, turn_number: int | None, branch_name: str | None) -> Steps[DeleteSnapshotResponse]:
    """Delete every snapshot of a turn (of branch main by default), of a branch, or of the whole conversation, in every
    tier. SnapshotError 404 when there is none."""
    if turn_number is not None:
        branch_name = branch_name or "main"
    found = yield from list_all(conversation_id, branch_name, None)
    chosen = [snapshot for snapshot in found if turn_number is None or snapshot.turn_number == turn_number]
    if not chosen:
        yield from find(conversation_id, turn_number, branch_name)
    for snapshot in chosen:
        yield Request("DELETE", f"/snapshots/{quote(snapshot.snapshot_id, safe='')}")
    return DeleteSnapshotResponse(conversation_id, turn_number, bool(chosen), len(chosen))


def decode(response: httpx.Response, conversation_id: str, error: type[SnapshotError]) -> Any:
    """The answer's JSON; `error` with the server's message for an error status or an answer that is not JSON."""
    if response.status_code >= 400:
        try:
            message = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = response.text[:500] or f"HTTP {response.status_code}"
        raise error(message, conversation_id, response.status_code)
    if response.status_code == 204:
        return {}
    try:
        answer = response.json()
    except ValueError as failure:
        raise error("the answer is not JSON", conversation_id, response.status_code) from failure
    if not isinstance(answer, dict):
        raise error("the answer is not an object", conversation_id, response.status_code)
    return answer
