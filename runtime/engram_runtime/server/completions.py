"""POST /v1/completions: one or more plain prompts, as text or token ids."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engram_runtime.engine.outputs import TokenLogprobs
from engram_runtime.server.conversation import read_wishes
from engram_runtime.server.errors import invalid
from engram_runtime.server.generation import (
    Begun,
    Candidate,
    Job,
    Tally,
    check_window,
    collect,
    engram,
    merged,
    outputs,
    usage,
)
from engram_runtime.server.protocol.completions import CompletionRequest
from engram_runtime.server.protocol.responses import Completion, ErrorBody
from engram_runtime.server.state import Loaded, ServerState, principal_of, state_of
from engram_runtime.server.streaming import EventStream
from engram_runtime.server.turns import check_model, find_base, turn_spec

router = APIRouter()
MAX_SEQUENCES = 1024


@dataclass(frozen=True, slots=True)
class TextJob:
    """A prompt with the text that `echo` shows."""

    job: Job
    shown: str


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={
        200: {"content": {"text/event-stream": {}}},
        **{status: {"model": ErrorBody} for status in (400, 401, 403, 404, 409, 413, 429, 503)},
    },
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue each prompt."""
    state = state_of(request)
    loaded = state.serving()
    check_model(state, body.model)
    if body.candidates * len(body.prompt) > MAX_SEQUENCES:
        raise invalid("prompt", f"prompt: at most {MAX_SEQUENCES} sequences per request (prompts times n or best_of)")
    request_id = f"cmpl-{secrets.token_hex(12)}"
    jobs = await _prepare(state, loaded, request, body, request_id)
    stream = merged([outputs(state, loaded, item.job) for item in jobs])
    if body.stream:
        return EventStream(_chunks(body, request_id, loaded, jobs, await Begun.of(stream)))
    tallies = [Tally(len(item.job.ids)) for item in jobs]
    groups = await collect(stream, tallies)
    return JSONResponse(_completion(loaded, body, request_id, jobs, tallies, groups))


async def _prepare(
    state: ServerState, loaded: Loaded, request: Request, body: CompletionRequest, request_id: str
) -> list[TextJob]:
    principal = principal_of(request)
    wishes = read_wishes(body, request.headers)
    base = await find_base(state, loaded, principal, wishes)
    # A lone prompt is not a conversation: it leaves something behind only if the request speaks of one.
    save = (
        wishes.save
        and len(body.prompt) == 1
        and (wishes.continues or wishes.conversation_id is not None or body.auto_save is True)
    )
    scored = body.echo and body.logprobs is not None
    params = body.sampling(
        max_tokens=max(body.max_tokens, 1),
        logprobs=body.logprobs if body.logprobs is not None or body.candidates == body.n else 0,
        n=body.candidates,
    )
    if scored:
        params = replace(params, prompt_logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0))
    params.check_vocabulary(loaded.engine.vocab_size)
    spec = turn_spec(loaded, principal, wishes, base)
    spec = replace(
        spec,
        save=save,
        durable=state.saving.durable(principal.tenant, spec.conversation_id, spec.branch_name),
        restore=wishes.restore and params.prompt_logprobs is None,
    )
    jobs = []
    for index, prompt in enumerate(body.prompt):
        name = "prompt" if len(body.prompt) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            ids = await loaded.renderer.encode(prompt, add_special_tokens=base is None)
            shown = prompt
        else:
            ids = list(prompt)
            unknown = next((token for token in ids if token >= loaded.engine.vocab_size), None)
            if unknown is not None:
                raise invalid(name, f"{name} holds token id {unknown}, the vocabulary has {loaded.engine.vocab_size}")
            shown = await loaded.renderer.decode(ids, skip_special_tokens=body.skip_special_tokens) if body.echo else ""
        if base is not None:
            ids = [*base.token_ids, *ids]
        if not ids:
            raise invalid(name, f"{name} must have at least one token")
        check_window("prompt", len(ids), body.max_tokens, loaded.engine.max_model_len)
        jobs.append(TextJob(Job(f"{request_id}-{index}", ids, params, spec), shown))
    return jobs


def _completion(
    loaded: Loaded,
    body: CompletionRequest,
    request_id: str,
    jobs: list[TextJob],
    tallies: list[Tally],
    groups: list[list[Candidate]],
) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for item, tally, group in zip(jobs, tallies, groups, strict=True):
        best = group
        if body.candidates > body.n:
            best = sorted(group, key=lambda candidate: -candidate.mean_logprob)[: body.n]
        for candidate in best:
            choices.append(_choice(loaded, body, len(choices), item, tally, candidate))
        if body.max_tokens == 0:
            tally.completion_tokens = {}
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
        "choices": choices,
        "usage": usage(tallies),
        "engram": engram(tallies[0].turn) if len(tallies) == 1 else None,
    }


def _choice(
    loaded: Loaded, body: CompletionRequest, index: int, item: TextJob, tally: Tally, candidate: Candidate
) -> dict[str, Any]:
    scoring_only = body.max_tokens == 0
    text = "" if scoring_only else candidate.text
    generated = [] if scoring_only else candidate.logprobs
    result: dict[str, Any] = {
        "index": index,
        "text": item.shown + text if body.echo else text,
        "logprobs": None,
        "finish_reason": "length" if scoring_only else candidate.finish_reason,
        "stop_reason": None if scoring_only else candidate.stop_reason,
    }
    if body.logprobs is not None:
        entries: list[tuple[int, TokenLogprobs | None]] = [(entry.token_id, entry) for entry in generated]
        if body.echo:
            entries = [*zip(item.job.ids, tally.prompt_logprobs or [], strict=True), *entries]
        result["logprobs"] = loaded.tokens.completion_logprobs(entries, body.logprobs, 0)
    if body.prompt_logprobs is not None and tally.prompt_logprobs is not None:
        result["prompt_logprobs"] = loaded.tokens.prompt_logprobs(tally.prompt_logprobs)
    return result


async def _chunks(
    body: CompletionRequest, request_id: str, loaded: Loaded, jobs: list[TextJob], stream: Begun
) -> AsyncGenerator[dict[str, Any]]:
    tallies = [Tally(len(item.job.ids)) for item in jobs]
    created = int(time.time())
    offsets: dict[int, int] = {}
    left = body.n * len(jobs)

    def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {
            "id": request_id,
            "object": "text_completion",
            "created": created,
            "model": body.model,
            "choices": choices,
        }
        if body.include_usage:
            result["usage"] = None
        return result

    def choice(index: int, text: str, **more: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}

    if body.echo:
        for number, item in enumerate(jobs):
            for candidate in range(body.n):
                yield chunk([choice(number * body.n + candidate, item.shown)])
    async with aclosing(stream):
        async for number, output in stream:
            tallies[number].add(output)
            index = number * body.n + output.index
            left -= output.finished
            if (output.delta or output.logprobs) and body.max_tokens > 0:
                logprobs = None
                if body.logprobs is not None:
                    entries = [(entry.token_id, entry) for entry in output.logprobs or ()]
                    offset = offsets.get(index, 0)
                    logprobs = loaded.tokens.completion_logprobs(entries, body.logprobs, offset)
                    offsets[index] = offset + sum(len(text) for text in logprobs["tokens"])
                yield chunk([choice(index, output.delta, logprobs=logprobs)])
            if output.finished:
                reason = "length" if body.max_tokens == 0 else output.finish_reason
                end = chunk([choice(index, "", finish_reason=reason, stop_reason=output.stop_reason)])
                if left == 0 and not body.include_usage and len(jobs) == 1:
                    end["engram"] = engram(tallies[0].turn)
                yield end
    if body.max_tokens == 0:
        for tally in tallies:
            tally.completion_tokens = {}
    if body.include_usage:
        report = engram(tallies[0].turn) if len(jobs) == 1 else None
        yield {**chunk([]), "usage": usage(tallies), "engram": report}
