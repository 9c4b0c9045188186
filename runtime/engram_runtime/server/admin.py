"""Admin port: what the operator and an administrator ask of, and do to, a running server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version as installed_version
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from engram_runtime.server.errors import store_reason
from engram_runtime.server.protocol.responses import ErrorBody
from engram_runtime.server.state import state_of
from engram_runtime.snapshots.types import Snapshots, TierStatus
from engram_runtime.snapshots.views import Census, SaveOutcomes

router = APIRouter(responses={status: {"model": ErrorBody} for status in (401, 403, 503)})

_USER_OF_URL = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY_OF_URL = re.compile(r"(\w+://[^\s?]*)\?\S*")


def redact(text: str) -> str:
    """Without the parts of URLs that may hold credentials."""
    return _QUERY_OF_URL.sub(r"\1", _USER_OF_URL.sub("", text))


def store_condition(tiers: Sequence[TierStatus]) -> dict[str, Any]:
    """Of the tier that outlives the server; reason LocalOnly where there is none."""
    found = next((tier for tier in tiers if tier.name == "store"), None)
    if found is None:
        return {"reachable": True, "reason": "LocalOnly", "message": "snapshots are kept by this server only"}
    if found.ready:
        return {"reachable": True, "reason": "StoreReachable", "message": redact(found.message)}
    reason = store_reason(found.reason)
    said = found.message if found.reason == reason else f"{found.reason}: {found.message}"
    return {"reachable": False, "reason": reason, "message": redact(said)}


def _kept(snapshots: Snapshots) -> tuple[Sequence[TierStatus], Census | None, SaveOutcomes]:
    overview = snapshots.overview
    return snapshots.status(), overview.census(0.5), overview.outcomes()


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """Phase, model, load, tiers and snapshots, as conditions can show them. Times are Unix seconds, sizes bytes."""
    state = state_of(request)
    loaded = state.loaded
    result: dict[str, Any] = {
        "version": installed_version("engram-platform"),
        "phase": state.admission.phase,
        "reason": redact(state.admission.reason),
        "sequences": state.admission.inside,
        "idle_seconds": round(state.admission.idle_seconds, 3),
        "background": len(state.background),
        "model": {
            "name": state.config.served_model_name,
            "digest": None,
            "architecture": None,
            "dtype": None,
            "weight_bytes": None,
        },
        "state_abi": None,
        "state_bytes": None,
        "kv_bytes_per_token": None,
        "requests": {"running": 0, "waiting": 0},
        "store": None,
        "snapshots": None,
        "tiers": [],
    }
    if loaded is None:
        return result
    facts, stats = loaded.engine.facts, state.metrics.stats()
    result["model"] |= {
        "digest": facts.weights_digest,
        "architecture": facts.architecture,
        "dtype": facts.dtype,
        "weight_bytes": facts.weight_bytes,
    }
    result |= {
        "state_abi": facts.state_abi,
        "state_bytes": facts.state_bytes,
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "requests": {"running": stats.running, "waiting": stats.waiting + stats.restoring + stats.swapped},
        "store": {"reachable": True, "reason": "Disabled", "message": "snapshots are off"},
    }
    if loaded.snapshots is None:
        return result
    tiers, census, outcomes = await run_in_threadpool(_kept, loaded.snapshots)
    result["tiers"] = [asdict(tier) | {"message": redact(tier.message)} for tier in tiers]
    result["store"] = store_condition(tiers)
    result["snapshots"] = {
        "count": None if census is None else census.count,
        "total_bytes": None if census is None else census.total_bytes,
        "last_success_time": outcomes.last_success_time,
        "last_failure_time": outcomes.last_failure_time,
        "last_error": None if outcomes.last_error is None else redact(outcomes.last_error),
    }
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
