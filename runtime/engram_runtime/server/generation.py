"""Running requests on the engine: errors before the first byte, several prompts as one stream, abort when dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

from engram_runtime.engine.outputs import RequestOutput, TokenLogprobs
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.server.errors import ApiError
from engram_runtime.server.state import Loaded, ServerState


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for the engine. `turn` is None where nothing is restored or saved."""

    request_id: str
    ids: Sequence[int]
    params: SamplingParams
    turn: TurnSpec | None


@dataclass(slots=True)
class Candidate:
    """One finished sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def mean_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs) / max(len(self.logprobs), 1)


@dataclass(slots=True)
class Tally:
    """What one prompt has cost and brought so far."""

    prompt_tokens: int
    completion_tokens: dict[int, int] = field(default_factory=dict)
    cached_tokens: int = 0
    turn: TurnReport | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, output: RequestOutput) -> None:
        self.completion_tokens[output.index] = len(output.token_ids)
        if output.index == 0:
            self.cached_tokens = output.cached_tokens
        if output.turn is not None:
            self.turn = output.turn
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs


def usage(tallies: Sequence[Tally]) -> dict[str, Any]:
    """OpenAI's usage object. `prompt_tokens` is the whole logical prompt, `cached_tokens` what was not computed."""
    prompt = sum(tally.prompt_tokens for tally in tallies)
    completion = sum(sum(tally.completion_tokens.values()) for tally in tallies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(tally.cached_tokens for tally in tallies)},
    }


def engram(report: TurnReport | None) -> dict[str, Any] | None:
    """The `engram` object of a response."""
    if report is None:
        return None
    return {name: getattr(report, name) for name in TurnReport.__dataclass_fields__}


async def outputs(state: ServerState, loaded: Loaded, job: Job) -> AsyncGenerator[RequestOutput]:
    """Outputs of one job, inside the admission. ApiError 503 when the server gave the request up."""
    running = job.params.n
    with state.admission.enter(running):
        stream = loaded.engine.generate(None, job.params, job.request_id, prompt_token_ids=job.ids, turn=job.turn)
        try:
            async for output in stream:
                if output.finish_reason == "error":
                    raise ApiError(500, "the engine failed on this request", code="engine_error")
                if output.finish_reason == "abort":
                    raise ApiError(
                        503, "the request was aborted: the server is stopping", code="aborted", retry_after=1
                    )
                running -= output.finished
                yield output
        finally:
            if running > 0:
                loaded.engine.abort(job.request_id)
            close = getattr(stream, "aclose", None)
            if close is not None:  # at once, not when it is collected
                await close()


async def merged(streams: Sequence[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(number of the stream, output) of several streams as they come; the first error ends all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=64)

    async def pump(number: int, stream: AsyncGenerator[RequestOutput]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((number, output))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Begun:
    """A stream whose first item has arrived: what is wrong with a request is known before any header is sent."""

    def __init__(self, stream: AsyncGenerator[tuple[int, RequestOutput]], first: tuple[int, RequestOutput]) -> None:
        self._stream = stream
        self._first: tuple[int, RequestOutput] | None = first

    @classmethod
    async def of(cls, stream: AsyncGenerator[tuple[int, RequestOutput]]) -> Self:
        try:
            return cls(stream, await anext(stream))
        except StopAsyncIteration:
            raise ApiError(500, "the engine gave no output", code="engine_error") from None

    def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._stream)

    async def aclose(self) -> None:
        await self._stream.aclose()


async def collect(stream: AsyncGenerator[tuple[int, RequestOutput]], tallies: Sequence[Tally]) -> list[list[Candidate]]:
    """Run to the end: per prompt, its sequences in order."""
    found: list[dict[int, Candidate]] = [{} for _ in tallies]
    async with aclosing(stream):
        async for number, output in stream:
            tallies[number].add(output)
            candidate = found[number].setdefault(output.index, Candidate(output.index))
            candidate.text, candidate.token_ids = output.text, output.token_ids
            candidate.logprobs.extend(output.logprobs or ())
            if output.finished:
                candidate.finish_reason, candidate.stop_reason = output.finish_reason, output.stop_reason
    return [[group[index] for index in sorted(group)] for group in found]


def check_window(
    field: str, prompt_tokens: int, max_tokens: int | None, window: int, limit: str = "max_tokens"
) -> None:
    """ApiError 400 `context_length_exceeded` unless prompt and output fit. `max_tokens` None or 0 asks for no room.

    field: where the prompt came from, "messages" or "prompt"; limit: where `max_tokens` did.
    """
    wanted = prompt_tokens + max(max_tokens or 0, 1)
    if wanted <= window:
        return
    asked = (
        f"you requested {wanted} tokens ({prompt_tokens} in the prompt, {wanted - prompt_tokens} for the completion)"
    )
    raise ApiError(
        400,
        f"This model's maximum context length is {window} tokens. However, {asked}. "
        f"Please reduce the length of the {field} or {limit}.",
        param=field if prompt_tokens >= window else limit,
        code="context_length_exceeded",
    )
