"""/v1/snapshots: list, save, show, restore, delete, follow."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from engram_runtime.server.protocol.responses import (
    Deleted,
    ErrorBody,
    Restored,
    Snapshot,
    SnapshotEvents,
    SnapshotList,
)
from engram_runtime.server.protocol.snapshots import RestoreRequest, SaveRequest
from engram_runtime.server.state import ServerState, principal_of, state_of
from engram_runtime.snapshots.policy.ids import (
    check_branch_name,
    check_conversation_id,
    check_snapshot_id,
    check_tag,
)
from engram_runtime.snapshots.types import SnapshotInfo

router = APIRouter(
    prefix="/v1/snapshots",
    responses={status: {"model": ErrorBody} for status in (400, 401, 403, 404, 409, 503)},
)
EVENT_LIMIT = 500


def show(info: SnapshotInfo, model: str) -> dict[str, Any]:
    """The REST form of a manifest summary."""
    return {
        "id": info.snapshot_id,
        "object": "snapshot",
        "conversation_id": info.conversation_id,
        "branch_name": info.branch_name,
        "turn_number": info.turn_number,
        "boundary": info.boundary,
        "parent": info.parent_id,
        "tokens": info.tokens,
        "pending": info.pending,
        "bytes": info.bytes,
        "tiers": list(info.tiers),
        "created": info.created,
        "expires": info.expires,
        "pinned": info.pinned,
        "tag": info.tag,
        "model": model,
        "state_abi": info.state_abi,
        "is_head": info.is_head,
    }


def _shown(state: ServerState, info: SnapshotInfo) -> dict[str, Any]:
    return show(info, state.config.served_model_name)


@router.get("", response_model=SnapshotList)
async def list_snapshots(
    request: Request,
    conversation_id: str | None = None,
    branch_name: str | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    after: Annotated[str | None, Query(max_length=512)] = None,
) -> dict[str, Any]:
    """Newest first, one page at a time; `after` is the `next_after` of the page before."""
    state, principal = state_of(request), principal_of(request)
    service = state.service()
    principal.require_memory("list")
    if conversation_id is not None:
        check_conversation_id(conversation_id)
    if branch_name is not None:
        check_branch_name(branch_name)
    page = await run_in_threadpool(
        service.list,
        principal.tenant,
        conversation_id=conversation_id,
        branch_name=branch_name,
        limit=limit,
        after=after,
    )
    return {
        "object": "list",
        "data": [_shown(state, info) for info in page.items],
        "has_more": page.next_after is not None,
        "next_after": page.next_after,
    }


@router.post("", response_model=Snapshot)
async def save_snapshot(request: Request, body: SaveRequest) -> dict[str, Any]:
    """Answers when the snapshot is durable."""
    state, principal = state_of(request), principal_of(request)
    service = state.service()
    principal.require_memory("conversation_id")
    check_conversation_id(body.conversation_id)
    check_branch_name(body.branch_name)
    if body.tag is not None:
        check_tag(body.tag)
    if state.loaded is not None:
        await state.loaded.engine.flush()  # the turn that just ended may wait for its next_history
    info = await run_in_threadpool(
        service.save_now,
        principal.tenant,
        body.conversation_id,
        turn_number=body.turn_number,
        branch_name=body.branch_name,
        tag=body.tag,
        pin=body.pin,
        ttl_seconds=body.ttl,
    )
    return _shown(state, info)


@router.get("/events", response_model=SnapshotEvents)
async def events(
    request: Request,
    after: Annotated[str | None, Query(max_length=512)] = None,
    limit: Annotated[int, Query(ge=1, le=EVENT_LIMIT)] = EVENT_LIMIT,
) -> dict[str, Any]:
    """Changes since a cursor, oldest first; go on from the `cursor` of the answer."""
    state, principal = state_of(request), principal_of(request)
    service = state.service()
    principal.require_memory("events")
    page = await run_in_threadpool(service.events, principal.tenant, after=after, limit=limit)
    return {
        "data": [
            {
                "cursor": item.cursor,
                "kind": item.kind,
                "snapshot_id": item.snapshot_id,
                "time": item.time,
                "snapshot": None if item.info is None else _shown(state, item.info),
            }
            for item in page.events
        ],
        "cursor": page.cursor,
    }


@router.get("/{snapshot_id}", response_model=Snapshot)
async def get_snapshot(request: Request, snapshot_id: str) -> dict[str, Any]:
    state, principal = state_of(request), principal_of(request)
    service = state.service()
    principal.require_memory("snapshot_id")
    check_snapshot_id(snapshot_id)
    return _shown(state, await run_in_threadpool(service.get, principal.tenant, snapshot_id))


@router.post("/{snapshot_id}/restore", response_model=Restored)
async def restore_snapshot(request: Request, snapshot_id: str, body: RestoreRequest | None = None) -> dict[str, Any]:
    """Make it the head of its branch, or bring its bytes to host memory; reports bytes moved and milliseconds."""
    state, principal = state_of(request), principal_of(request)
    service = state.service()
    principal.require_memory("snapshot_id")
    check_snapshot_id(snapshot_id)
    if (body or RestoreRequest()).action == "head":
        started = asyncio.get_running_loop().time()
        info = await run_in_threadpool(service.set_head, principal.tenant, snapshot_id)
        state.recent.forget_branch(principal.tenant, info.conversation_id, info.branch_name)
        seconds = asyncio.get_running_loop().time() - started
        return {"snapshot": _shown(state, info), "head": True, "bytes": 0, "milliseconds": seconds * 1e3, "tier": None}
    report = await run_in_threadpool(service.prefetch, principal.tenant, snapshot_id)
    info = await run_in_threadpool(service.get, principal.tenant, snapshot_id)
    return {
        "snapshot": _shown(state, info),
        "head": False,
        "bytes": report.bytes,
        "milliseconds": report.milliseconds,
        "tier": report.tier,
    }


@router.delete("/{snapshot_id}", response_model=Deleted)
async def delete_snapshot(request: Request, snapshot_id: str) -> dict[str, Any]:
    """Gone in every tier when this answers."""
    state, principal = state_of(request), principal_of(request)
    service = state.service()
    principal.require_memory("snapshot_id")
    check_snapshot_id(snapshot_id)
    info = await run_in_threadpool(service.delete, principal.tenant, snapshot_id)
    state.recent.forget(principal.tenant, info.conversation_id, info.turn_number)
    return {"id": snapshot_id, "object": "snapshot.deleted", "deleted": True}
