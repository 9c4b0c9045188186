"""The five snapshot calls of the original Engram server, for its clients.

Field names are the original's; statuses are honest: it answered 200 to a save that failed and 500 to an unknown turn.
It kept one state per turn, the end of the turn, so these calls speak of that one where a turn has left several. Where
the end gave way to what was computed for the next turn, they speak of the latter; `boundary` says which it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.errors import Conflict, NotFound, SnapshotError
from engram_runtime.server.errors import ApiError, from_validation, invalid, translate
from engram_runtime.server.generation import Candidate, Job, Tally, check_window, collect, engram, merged, outputs
from engram_runtime.server.protocol.legacy import (
    LegacyDeleted,
    LegacyError,
    LegacyInfo,
    LegacyList,
    LegacyRestore,
    LegacyRestored,
    LegacySave,
    LegacySaved,
    LegacySnapshots,
    LegacyTurn,
    failure,
)
from engram_runtime.server.state import ServerState, principal_of, state_of
from engram_runtime.server.tenants import Principal
from engram_runtime.snapshots.policy.ids import check_branch_name, check_conversation_id, check_tag
from engram_runtime.snapshots.types import PrefetchReport, SnapshotContent, SnapshotInfo, Snapshots

MAIN = "main"
PAGE = 500
GATHER_SECONDS = 30.0
LISTED_IDS = 1 << 20
"""Token ids in one listing: each turn repeats the history before it, so longer ones are left to single look-ups."""


class LegacyRoute(APIRoute):
    """Errors also carry `success` and `message`, which is all that the original's clients read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                answer = from_validation(error.errors(), error.body)
            except (ApiError, ValueError, NotFound, Conflict, SnapshotError) as error:
                answer = translate(error)
            return JSONResponse(failure(answer.body()), answer.status, headers=answer.headers)

        return handler


router = APIRouter(
    route_class=LegacyRoute,
    responses={status: {"model": LegacyError} for status in (400, 403, 404, 409, 503)},
)


@router.post("/save_snapshot", response_model=LegacySaved)
async def save_snapshot(request: Request, body: LegacySave) -> dict[str, Any]:
    """Answers when the snapshot is durable. 409 when `snapshot_id` already names another turn."""
    _, service, principal = await _begin(request, "conversation_id")
    conversation, branch = _place(body.conversation_id or body.rid, body.branch_name)
    if body.snapshot_id is not None:
        try:
            check_tag(body.snapshot_id)
        except ValueError as error:
            raise invalid("snapshot_id", f"snapshot_id: {error}") from error

    def save(turn: int | None, tag: str | None) -> SnapshotInfo:
        return service.save_now(principal.tenant, conversation, turn_number=turn, branch_name=branch, tag=tag)

    def save_and_name() -> SnapshotInfo:
        saved = save(body.turn_number, None)
        if body.snapshot_id is None:
            return saved
        for info in _snapshots(service, principal.tenant, conversation):
            here = (info.branch_name, info.turn_number) == (branch, saved.turn_number)
            if info.tag == body.snapshot_id and not here:
                raise Conflict(f"snapshot_id {body.snapshot_id!r} is the name of turn {info.turn_number} already")
        return save(saved.turn_number, body.snapshot_id)

    info = await run_in_threadpool(save_and_name)
    return {"success": True, "snapshot_id": info.snapshot_id, "message": f"turn {info.turn_number} is saved"}


@router.post("/restore_snapshot", response_model=LegacyRestored)
async def restore_snapshot(request: Request, body: LegacyRestore) -> dict[str, Any]:
    """Fetch a turn's end to host memory; with `create_new_request` also generate from there. Leaves nothing behind."""
    state, service, principal = await _begin(request, "restore_snapshot")
    conversation, branch = _place(body.conversation_id or body.rid, body.branch_name)

    def fetch() -> tuple[SnapshotInfo, SnapshotContent, PrefetchReport]:
        info = _turn_end(service, principal.tenant, conversation, body.turn_number, branch)
        # Before anything is generated: a snapshot that cannot be read is a failure here, not a slow success.
        report = service.prefetch(principal.tenant, info.snapshot_id)
        return info, service.content(principal.tenant, info.snapshot_id), report

    info, content, report = await run_in_threadpool(fetch)
    answer: dict[str, Any] = {
        "success": True,
        "rid": body.request_id or body.rid or conversation,
        "mamba_pool_idx": None,
        "message": f"turn {info.turn_number} is in host memory: later requests that continue it start there",
        "token_count": info.tokens,
        "output_ids": None,
        "output_text": None,
        "finish_reason": None,
        "snapshot_id": info.snapshot_id,
        "turn_number": info.turn_number,
        "tier": report.tier,
        "bytes": report.bytes,
        "restore_time_ms": report.milliseconds,
        "engram": None,
    }
    if body.create_new_request:
        rid = body.request_id or f"restored-{secrets.token_hex(4)}"
        found, tally = await _generate(state, principal.tenant, body, info, content)
        answer |= {
            "rid": rid,
            "message": f"continued turn {info.turn_number}",
            "output_ids": found.token_ids,
            "output_text": found.text,
            "finish_reason": found.finish_reason,
            "engram": engram(tally.turn),
        }
    return answer


async def _generate(
    state: ServerState, tenant: str, body: LegacyRestore, info: SnapshotInfo, content: SnapshotContent
) -> tuple[Candidate, Tally]:
    loaded = state.serving()
    more = body.continuation_ids or []
    unknown = next((token for token in more if token >= loaded.engine.vocab_size), None)
    if unknown is not None:
        raise invalid(
            "continuation_ids",
            f"continuation_ids holds token id {unknown}, the vocabulary has {loaded.engine.vocab_size}",
        )
    ids = [*content.token_ids, *content.pending_ids, *more]
    check_window("continuation_ids", len(ids), body.max_new_tokens, loaded.engine.max_model_len, "max_new_tokens")
    params = SamplingParams(
        max_tokens=body.max_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        seed=body.seed,
        ignore_eos=body.ignore_eos,
    )
    turn = TurnSpec(
        tenant=tenant,
        conversation_id=info.conversation_id,
        branch_name=info.branch_name,
        turn_number=info.turn_number + 1,
        candidates=(info.tokens,) if info.tokens < len(ids) else (),
        save=False,
        restore_from=info.snapshot_id,
    )
    tally = Tally(len(ids))
    job = Job(f"restored-{secrets.token_hex(12)}", ids, params, turn)
    groups = await collect(merged([outputs(state, loaded, job)]), [tally])
    return groups[0][0], tally


@router.post("/list_snapshots", response_model=LegacySnapshots)
async def list_snapshots(request: Request, body: LegacyList) -> dict[str, Any]:
    """The turns of a conversation, oldest first, then its branches. `fill_ids` is null where a listing got too long."""
    state, service, principal = await _begin(request, "list")
    conversation, _ = _place(body.conversation_id, None)

    def collected() -> list[dict[str, Any]]:
        ends: dict[tuple[str, int], SnapshotInfo] = {}
        for info in _snapshots(service, principal.tenant, conversation):
            place = (info.branch_name, info.turn_number)
            if info.boundary != "user_start" and (place not in ends or info.boundary == "turn_end"):
                ends[place] = info
        shown, room = [], LISTED_IDS
        for _, info in sorted(ends.items(), key=lambda item: (item[0][0] != MAIN, item[0])):
            room -= info.tokens + info.pending
            shown.append(_metadata(state, service, principal.tenant, info, with_ids=room >= 0))
        return shown

    return {"success": True, "snapshots": await run_in_threadpool(collected)}


@router.post("/get_snapshot_info", response_model=LegacyInfo)
async def get_snapshot_info(request: Request, body: LegacyTurn) -> dict[str, Any]:
    """A turn, or the newest turn of a branch."""
    state, service, principal = await _begin(request, "conversation_id")
    conversation, branch = _place(body.conversation_id, body.branch_name)

    def look() -> dict[str, Any]:
        info = _turn_end(service, principal.tenant, conversation, body.turn_number, branch)
        return _metadata(state, service, principal.tenant, info, with_ids=True)

    return {"success": True, "metadata": await run_in_threadpool(look)}


@router.post("/delete_snapshot", response_model=LegacyDeleted)
async def delete_snapshot(request: Request, body: LegacyTurn) -> dict[str, Any]:
    """A turn with all its snapshots, or a whole branch: gone in every tier when this answers."""
    state, service, principal = await _begin(request, "conversation_id")
    conversation, branch = _place(body.conversation_id, body.branch_name)

    def delete() -> list[SnapshotInfo]:
        gone = []
        for info in list(_snapshots(service, principal.tenant, conversation, branch)):
            if body.turn_number in (None, info.turn_number):
                try:
                    gone.append(service.delete(principal.tenant, info.snapshot_id))
                except NotFound:  # someone else was faster
                    continue
        return gone

    gone = await run_in_threadpool(delete)
    for info in gone:
        state.recent.forget(principal.tenant, conversation, info.turn_number)
    if not gone:
        raise NotFound(
            f"Snapshot not found: conversation={conversation}, turn={body.turn_number}, branch={body.branch_name}"
        )
    return {"success": True, "message": "Snapshot deleted successfully", "deleted": len(gone)}


async def _begin(request: Request, what: str) -> tuple[ServerState, Snapshots, Principal]:
    """Who calls, and the snapshots, those of the turn that has just ended among them."""
    state, principal = state_of(request), principal_of(request)
    service = state.service()
    principal.require_memory(what)
    assert state.loaded is not None
    await state.loaded.engine.flush()
    if not await run_in_threadpool(service.gathered, GATHER_SECONDS):
        raise ApiError(
            503, "the last turn is still on its way to host memory", code="snapshot_unavailable", retry_after=1
        )
    return state, service, principal


def _place(conversation: str | None, branch: str | None) -> tuple[str, str]:
    """(conversation, branch), checked. ApiError 400 or ValueError names the field."""
    if conversation is None:
        raise invalid("conversation_id", "conversation_id or rid is required")
    return check_conversation_id(conversation), check_branch_name(branch if branch is not None else MAIN)


def _snapshots(service: Snapshots, tenant: str, conversation: str, branch: str | None = None) -> Iterator[SnapshotInfo]:
    """Newest first, page by page. Blocking."""
    after: str | None = None
    while True:
        page = service.list(tenant, conversation_id=conversation, branch_name=branch, limit=PAGE, after=after)
        yield from page.items
        after = page.next_after
        if after is None:
            return


def _turn_end(service: Snapshots, tenant: str, conversation: str, turn: int | None, branch: str) -> SnapshotInfo:
    """What a turn (default: the newest) left at its end, else the best that is left of it. Blocking; NotFound."""
    newest = service.resolve(tenant, conversation, turn, branch)
    if newest.boundary == "turn_end":
        return newest
    same = (
        info
        for info in _snapshots(service, tenant, conversation, branch)
        if (info.turn_number, info.boundary) == (newest.turn_number, "turn_end")
    )
    return next(same, newest)


def _metadata(
    state: ServerState, service: Snapshots, tenant: str, info: SnapshotInfo, *, with_ids: bool
) -> dict[str, Any]:
    """The original's metadata of a turn, and what it lacked. Blocking where ids are wanted."""
    ids: Sequence[int] | None = None
    if with_ids:
        content = service.content(tenant, info.snapshot_id)
        ids = [*content.token_ids, *content.pending_ids]
    return {
        "conversation_id": info.conversation_id,
        "turn_number": info.turn_number,
        "timestamp": info.created,
        "token_count": info.tokens,
        "model_name": state.config.served_model_name,
        "mamba_pool_idx": None,
        "req_pool_idx": None,
        "layer_config": None,
        "active_tool_context": None,
        "branch_name": None if info.branch_name == MAIN else info.branch_name,
        "parent_snapshot": info.parent_id,
        "fill_ids": ids,
        "snapshot_id": info.snapshot_id,
        "boundary": info.boundary,
        "created_at": datetime.fromtimestamp(info.created, UTC).isoformat(),
        "size_bytes": info.bytes,
        "tier": info.tiers[0] if info.tiers else "host",
    }
