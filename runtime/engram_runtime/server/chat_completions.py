"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engram_runtime.server.generation import Begun, Candidate, Tally, collect, engram, merged, outputs, usage
from engram_runtime.server.protocol.chat import ChatRequest
from engram_runtime.server.protocol.responses import ChatCompletion, ErrorBody
from engram_runtime.server.state import Loaded, ServerState, principal_of, state_of
from engram_runtime.server.streaming import EventStream
from engram_runtime.server.turns import ChatTurn, check_model, finish, prepare

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={
        200: {"content": {"text/event-stream": {}}},
        **{status: {"model": ErrorBody} for status in (400, 401, 403, 404, 409, 413, 429, 503)},
    },
)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """One turn of a conversation. With the header `x-engram-features: delta` the answer offers `delta`."""
    state = state_of(request)
    loaded = state.serving()
    check_model(state, body.model)
    request_id = f"chatcmpl-{secrets.token_hex(12)}"
    principal = principal_of(request)
    turn = await prepare(state, loaded, principal, request.headers, body, request_id)
    # Tells clients that the next request may carry its new messages only.
    headers = {"x-engram-features": "delta"} if principal.remembers else {}
    stream = merged([outputs(state, loaded, turn.job)])
    if body.stream:
        return EventStream(_chunks(state, loaded, turn, body, await Begun.of(stream)), headers)
    tally = Tally(len(turn.prompt.ids))
    (candidates,) = await collect(stream, [tally])
    finish(state, loaded, turn, tally.turn, candidates[0].text)
    return JSONResponse(_completion(loaded, turn, body, tally, candidates), headers=headers)


def _completion(
    loaded: Loaded, turn: ChatTurn, body: ChatRequest, tally: Tally, candidates: list[Candidate]
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "id": turn.job.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
        "choices": [
            {
                "index": candidate.index,
                "message": {"role": "assistant", "content": candidate.text, "refusal": None},
                "logprobs": _logprobs(loaded, body, candidate.logprobs),
                "finish_reason": candidate.finish_reason,
                "stop_reason": candidate.stop_reason,
            }
            for candidate in candidates
        ],
        "usage": usage([tally]),
        "engram": engram(tally.turn),
    }
    if tally.prompt_logprobs is not None:
        result["prompt_logprobs"] = loaded.tokens.prompt_logprobs(tally.prompt_logprobs)
    return result


async def _chunks(
    state: ServerState, loaded: Loaded, turn: ChatTurn, body: ChatRequest, stream: Begun
) -> AsyncGenerator[dict[str, Any]]:
    """Role chunk, deltas, finish chunk per choice; then, if asked for, one chunk with usage. The last of them has
    `engram`."""
    tally = Tally(len(turn.prompt.ids))
    created = int(time.time())

    def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {
            "id": turn.job.request_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": body.model,
            "choices": choices,
        }
        if body.include_usage:
            result["usage"] = None
        return result

    def choice(index: int, delta: dict[str, str], **more: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    for index in range(body.n):
        yield chunk([choice(index, {"role": "assistant", "content": ""})])
    left = body.n
    async with aclosing(stream):
        async for _, output in stream:
            tally.add(output)
            if output.delta or output.logprobs:
                logprobs = _logprobs(loaded, body, output.logprobs or [])
                yield chunk([choice(output.index, {"content": output.delta}, logprobs=logprobs)])
            if output.finished:
                left -= 1
                if left == 0:
                    finish(state, loaded, turn, tally.turn, output.text)
                end = chunk(
                    [choice(output.index, {}, finish_reason=output.finish_reason, stop_reason=output.stop_reason)]
                )
                if left == 0 and not body.include_usage:
                    end["engram"] = engram(tally.turn)
                yield end
    if body.include_usage:
        yield {**chunk([]), "usage": usage([tally]), "engram": engram(tally.turn)}


def _logprobs(loaded: Loaded, body: ChatRequest, entries: list[Any]) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return {"content": loaded.tokens.chat_logprobs(entries, body.top_logprobs or 0), "refusal": None}
