"""Admin port, /snapshots: every tenant's snapshots by keyed hashes, for the operator.

No answer holds a name that a user gave; only the call that takes a snapshot now is told one.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from engram_runtime.errors import NotFound
from engram_runtime.server.errors import ApiError, invalid
from engram_runtime.server.protocol.admin import (
    AdminEvents,
    AdminSnapshots,
    ChangeRequest,
    HashedSnapshot,
    Removed,
    Taken,
    TakeRequest,
)
from engram_runtime.server.protocol.responses import ErrorBody
from engram_runtime.server.state import principal_of, state_of
from engram_runtime.snapshots.policy.ids import (
    check_branch_name,
    check_conversation_id,
    check_snapshot_id,
    check_tag,
    check_tenant,
)
from engram_runtime.snapshots.views import KEEP

router = APIRouter(
    prefix="/snapshots",
    responses={status: {"model": ErrorBody} for status in (400, 401, 403, 404, 503)},
)
EVENT_LIMIT = 500


@router.get("", response_model=AdminSnapshots)
async def list_all(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    after: Annotated[str | None, Query(max_length=512)] = None,
) -> dict[str, Any]:
    """All tenants, newest first; `after` is the `next` of the page before. `count` and `total_bytes` are of all that
    this model has in the store, up to a minute old, and null until first counted."""
    overview = state_of(request).service().overview
    page = await run_in_threadpool(overview.page, limit=limit, after=after)
    census = await run_in_threadpool(overview.census)
    return {
        "snapshots": [asdict(view) for view in page.items],
        "next": page.next,
        "count": None if census is None else census.count,
        "total_bytes": None if census is None else census.total_bytes,
    }


@router.get("/events", response_model=AdminEvents)
async def all_events(
    request: Request,
    after: Annotated[str | None, Query(max_length=512)] = None,
    limit: Annotated[int, Query(ge=1, le=EVENT_LIMIT)] = EVENT_LIMIT,
) -> dict[str, Any]:
    """Changes since a cursor, oldest first. Without one, or with one that is too old, `lost` is true: list everything,
    then go on from `next`."""
    overview = state_of(request).service().overview
    page = await run_in_threadpool(overview.events, after=after, limit=limit)
    events = [{"kind": event.kind, "snapshot": asdict(event.snapshot)} for event in page.events]
    return {"events": events, "next": page.next, "lost": page.lost}


@router.post("", response_model=Taken)
async def take(request: Request, body: TakeRequest) -> dict[str, Any]:
    """Make a conversation's newest snapshot (or a turn's) durable now, and label it; answers when that is done."""
    state = state_of(request)
    service = state.service()
    tenant = check_tenant(body.tenant or principal_of(request).tenant)
    check_conversation_id(body.conversation_id)
    check_branch_name(body.branch_name)
    if body.tag is not None:
        check_tag(body.tag)
    if state.loaded is not None:
        await state.loaded.engine.flush()  # the turn that just ended may wait for its next_history
    try:
        info = await run_in_threadpool(
            service.save_now,
            tenant,
            body.conversation_id,
            turn_number=body.turn_number,
            branch_name=body.branch_name,
            tag=body.tag,
            pin=body.pin,
            ttl_seconds=body.ttl_seconds,
        )
    except NotFound as error:
        raise ApiError(404, str(error), param="conversation_id", code="not_found") from error
    view = await run_in_threadpool(service.overview.view, info.snapshot_id)
    return {"snapshots": [asdict(view)]}


@router.get("/{snapshot_id}", response_model=HashedSnapshot)
async def show(request: Request, snapshot_id: str) -> dict[str, Any]:
    service = state_of(request).service()
    check_snapshot_id(snapshot_id)
    return asdict(await run_in_threadpool(service.overview.view, snapshot_id))


@router.patch("/{snapshot_id}", response_model=HashedSnapshot)
async def change(request: Request, snapshot_id: str, body: ChangeRequest) -> dict[str, Any]:
    """Pin or unpin; a new expiry counted from now, or with null none. It is stored with the snapshot, signed."""
    service = state_of(request).service()
    check_snapshot_id(snapshot_id)
    if not body.model_fields_set:
        raise invalid(None, "name at least one of pinned and ttl_seconds")
    view = await run_in_threadpool(
        service.overview.change,
        snapshot_id,
        pinned=body.pinned,
        ttl_seconds=body.ttl_seconds if "ttl_seconds" in body.model_fields_set else KEEP,
    )
    return asdict(view)


@router.delete("/{snapshot_id}", response_model=Removed)
async def remove(request: Request, snapshot_id: str) -> dict[str, Any]:
    """Gone in every tier when this answers; 404 when there is none."""
    state = state_of(request)
    service = state.service()
    check_snapshot_id(snapshot_id)
    removed = await run_in_threadpool(service.overview.remove, snapshot_id)
    if removed.tenant is not None and removed.view.turn_number is not None:
        state.recent.forget(removed.tenant, removed.conversation_id, removed.view.turn_number)
    return {"deleted": True, "bytes": removed.view.bytes}
