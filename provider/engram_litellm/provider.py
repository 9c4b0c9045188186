"""The LiteLLM provider: `litellm.completion(model="engram/NAME", ...)` and its async and streaming forms.

A `CustomLLM` in `litellm.custom_provider_map` is LiteLLM's one documented way in for outside packages. `streaming` is a
plain function on purpose: written as a generator, its status would only be seen at the first chunk, and a 429 would
come out as a mid-stream failure that no retry or fallback of LiteLLM handles.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import litellm
from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import ModelResponse
from litellm.utils import custom_llm_setup

from engram_litellm import litellm_errors
from engram_litellm.call import Attempt, Call, Core
from engram_litellm.discovery.chain import Discovery
from engram_litellm.discovery.endpoints import NotYet
from engram_litellm.lines import aiterate, iterate
from engram_litellm.redis_tracker import RedisTracker
from engram_litellm.request import ChatRequest, parse
from engram_litellm.responses import build_response, engram_of, parse_answer, reply_of
from engram_litellm.routing import Balancer
from engram_litellm.settings import Settings
from engram_litellm.streaming import Chunk, StreamShaper
from engram_litellm.tracker import LocalTracker
from engram_litellm.transport import Clients, limits

PROVIDER = "engram"


class EngramLLM(CustomLLM):
    """The handler LiteLLM calls. One instance serves every thread, event loop and model of a process."""

    def __init__(self, read_settings: Callable[[], Settings] = Settings.from_env) -> None:
        super().__init__()
        self._read_settings = read_settings
        self._lock = threading.Lock()
        self._core: Core | None = None
        self._clients: Clients | None = None

    def completion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """One answer. Raises litellm's exceptions."""
        call, request, clients = self._begin(kwargs, stream=False)
        try:
            response = _open(call, request, clients, stream=False)
            answer = parse_answer(response, request.model)
            engram = call.metadata(engram_of(answer))
            call.remember(reply_of(answer), engram)
            return build_response(answer, request.model, response.headers, engram)
        finally:
            call.close()

    async def acompletion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """One answer. Cancelling the task closes the connection, on which the server aborts the request."""
        response, engram = await self.acompletion_raw(**kwargs)
        model = str(kwargs["model"])
        return build_response(parse_answer(response, model), model, response.headers, engram)

    async def acompletion_raw(self, **kwargs: Any) -> tuple[httpx.Response, dict[str, Any]]:
        """The server's own answer, and its `engram` object completed by this side."""
        call, request, clients = self._begin(kwargs, stream=False)
        try:
            response = await _aopen(call, request, clients, stream=False)
            answer = parse_answer(response, request.model)
            engram = call.metadata(engram_of(answer))
            await _maybe_in_thread(call.tracker_blocks, lambda: call.remember(reply_of(answer), engram))
            return response, engram
        finally:
            call.close()

    def streaming(self, *args: Any, **kwargs: Any) -> Iterator[Chunk]:  # type: ignore[override]
        """Chunks of one answer. The status is known when this returns, so errors are raised here."""
        call, request, clients = self._begin(kwargs, stream=True)
        try:
            response = _open(call, request, clients, stream=True)
        except BaseException:
            call.close()
            raise
        chunks = _chunks(call, request, clients, response)
        next(chunks)  # a generator that never started would not run its `finally` when it is dropped
        return chunks

    async def astreaming(self, *args: Any, **kwargs: Any) -> AsyncIterator[Chunk]:  # type: ignore[override]
        """Chunks of one answer. LiteLLM wraps the generator before it runs, so failures before the first byte are
        retried here."""
        call, request, clients = self._begin(kwargs, stream=True)
        response: httpx.Response | None = None
        try:
            while True:
                response = await _aopen(call, request, clients, stream=True)
                shaper = StreamShaper(request.model, call.metadata)
                try:
                    async for line in aiterate(response.aiter_bytes()):
                        for chunk in shaper.feed(line):
                            yield chunk
                    break
                except httpx.HTTPError as error:
                    if shaper.started:
                        raise litellm_errors.from_transport(error, request.model) from error
                    delay = call.broken(error)
                await response.aclose()
                await asyncio.sleep(delay)
            last = list(shaper.end())
            await _maybe_in_thread(call.tracker_blocks, lambda: call.remember(shaper.reply(), shaper.engram))
            for chunk in last:
                yield chunk
        finally:
            call.close()
            if response is not None:
                await response.aclose()

    def _begin(self, kwargs: dict[str, Any], *, stream: bool) -> tuple[Call, ChatRequest, Clients]:
        model = str(kwargs.get("model"))
        try:
            settings = self._read_settings()
            request = parse(kwargs, settings, stream=stream)
            core, clients = self._shared(settings)
        except ValueError as error:
            raise litellm_errors.bad_request(str(error), model) from error
        return Call(core, request), request, clients

    def _shared(self, settings: Settings) -> tuple[Core, Clients]:
        """Discovery, tracker and clients of these settings; made anew when the environment changed."""
        with self._lock:
            if self._core is None or self._clients is None or self._core.settings != settings:
                url = settings.tracker_redis_url
                tracker = RedisTracker(url, settings.tracker_ttl) if url else LocalTracker(ttl=settings.tracker_ttl)
                if self._core is not None:
                    self._core.discovery.close()
                self._core = Core(settings, Discovery(settings), Balancer(), tracker, tracker_blocks=bool(url))
                self._clients = Clients(settings.ca_file)
            return self._core, self._clients


def register(handler: EngramLLM) -> None:
    """Append the handler to LiteLLM's provider map. Other providers in it stay; a second call changes nothing."""
    if not any(entry["provider"] == PROVIDER for entry in litellm.custom_provider_map):
        litellm.custom_provider_map.append({"provider": PROVIDER, "custom_handler": handler})
    custom_llm_setup()  # type: ignore[no-untyped-call]


def _open(call: Call, request: ChatRequest, clients: Clients, *, stream: bool) -> httpx.Response:
    """Send until an answer is accepted. The response of a stream is open."""
    call.recall()
    while True:
        call.locate(wait=True)
        attempt = call.attempt()
        if isinstance(attempt, float):
            time.sleep(attempt)
            continue
        client = clients.sync(attempt.explicit)
        try:
            response = client.send(_built(client, attempt, request), stream=stream)
            if response.status_code >= 400:
                response.read()
        except httpx.HTTPError as error:
            delay = call.broken(error)
        else:
            again = call.answered(response)
            if again is None:
                return response
            response.close()
            delay = again
        time.sleep(delay)


async def _aopen(call: Call, request: ChatRequest, clients: Clients, *, stream: bool) -> httpx.Response:
    """As `_open`, on an event loop: whatever may block runs in a thread."""
    await _maybe_in_thread(call.tracker_blocks, call.recall)
    while True:
        try:
            call.locate(wait=False)
        except NotYet:
            await asyncio.to_thread(call.locate, wait=True)
        attempt = call.attempt()
        if isinstance(attempt, float):
            await asyncio.sleep(attempt)
            continue
        client = clients.on_loop(attempt.explicit)
        try:
            response = await client.send(_built(client, attempt, request), stream=stream)
            if response.status_code >= 400:
                await response.aread()
        except httpx.HTTPError as error:
            delay = call.broken(error)
        else:
            again = call.answered(response)
            if again is None:
                return response
            await response.aclose()
            delay = again
        await asyncio.sleep(delay)


def _chunks(call: Call, request: ChatRequest, clients: Clients, response: httpx.Response) -> Iterator[Chunk]:
    """The body of an accepted stream, after one chunk that only starts the generator. Closing or dropping it closes
    the connection. A replica that is lost before anything was given out is replaced."""
    try:
        yield {}
        while True:
            shaper = StreamShaper(request.model, call.metadata)
            try:
                for line in iterate(response.iter_bytes()):
                    yield from shaper.feed(line)
                break
            except httpx.HTTPError as error:
                if shaper.started:
                    raise litellm_errors.from_transport(error, request.model) from error
                delay = call.broken(error)
            response.close()
            time.sleep(delay)
            response = _open(call, request, clients, stream=True)
        last = list(shaper.end())
        call.remember(shaper.reply(), shaper.engram)
        yield from last
    finally:
        call.close()
        response.close()


def _built(client: httpx.Client | httpx.AsyncClient, attempt: Attempt, request: ChatRequest) -> httpx.Request:
    return client.build_request(
        "POST", attempt.url, content=attempt.content, headers=attempt.headers, timeout=limits(request.timeout)
    )


async def _maybe_in_thread(blocking: bool, work: Callable[[], None]) -> None:
    if blocking:
        await asyncio.to_thread(work)
    else:
        work()
