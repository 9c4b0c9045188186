"""Three probes with three meanings: the process runs, the model is loaded, new turns are welcome."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from engram_runtime.server.protocol.responses import Health
from engram_runtime.server.state import ServerState, state_of

router = APIRouter(prefix="/health", responses={503: {"model": Health}})


def _answer(ok: bool, status: str, reason: str) -> JSONResponse:
    return JSONResponse({"status": status, "reason": reason}, 200 if ok else 503)


def _dead(state: ServerState) -> BaseException | None:
    return state.loaded.engine.error if state.loaded is not None else None


@router.get("/live", response_model=Health)
async def live(request: Request) -> JSONResponse:
    """200 unless a restart is the only help: the engine is dead."""
    state = state_of(request)
    error = _dead(state)
    if error is not None:
        return _answer(False, "dead", f"the engine stopped: {error}")
    return _answer(True, "live", state.admission.reason)


@router.get("/startup", response_model=Health)
async def startup(request: Request) -> JSONResponse:
    """200 once the model has loaded, and from then on."""
    state = state_of(request)
    return _answer(state.loaded is not None, state.admission.phase, state.admission.reason)


@router.get("", response_model=Health, include_in_schema=False)
@router.get("/ready", response_model=Health)
async def ready(request: Request) -> JSONResponse:
    """200 while new turns are welcome."""
    state = state_of(request)
    error = _dead(state)
    if error is not None:
        return _answer(False, "dead", f"the engine stopped: {error}")
    return _answer(state.admission.phase == "ready", state.admission.phase, state.admission.reason)
