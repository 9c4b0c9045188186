"""Admin port: what the operator and an administrator do to a running server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from engram_runtime.server.protocol.responses import ErrorBody
from engram_runtime.server.state import state_of

router = APIRouter(responses={status: {"model": ErrorBody} for status in (401, 403, 503)})


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """Phase, load and tiers, as conditions can show them."""
    state = state_of(request)
    loaded = state.loaded
    result: dict[str, Any] = {
        "model": state.config.served_model_name,
        "phase": state.admission.phase,
        "reason": state.admission.reason,
        "sequences": state.admission.inside,
        "background": len(state.background),
        "tiers": [],
    }
    if loaded is not None and loaded.snapshots is not None:
        result["tiers"] = [asdict(tier) for tier in await run_in_threadpool(loaded.snapshots.status)]
    return result


@router.post("/drain")
async def drain(request: Request) -> dict[str, Any]:
    """Take no new turns from now on; running ones finish. What remains of a stop is the process's own signal."""
    state = state_of(request)
    if state.admission.phase == "ready":
        state.admission.move("draining", "the server was told to drain")
    return {"phase": state.admission.phase, "sequences": state.admission.inside}


@router.post("/snapshots/sweep")
async def sweep(request: Request) -> dict[str, Any]:
    """Apply retention and collect garbage now."""
    return asdict(await run_in_threadpool(state_of(request).service().sweep))


@router.post("/snapshots/fsck")
async def fsck(request: Request, repair: bool = False) -> dict[str, Any]:
    """Verify every tier."""
    service = state_of(request).service()
    reports = await run_in_threadpool(lambda: list(service.fsck(repair=repair)))
    return {"ok": all(report.ok for report in reports), "tiers": [asdict(report) for report in reports]}
