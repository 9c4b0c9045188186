"""Pure ASGI middleware: what must happen before a body is parsed, and what must happen when the caller goes away.

Starlette's BaseHTTPMiddleware hides the disconnect from the application, so a dropped caller would keep the engine
busy; here the request's task is cancelled within a loop turn, streamed or not, and the engine aborts.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram_runtime.server.errors import ApiError
from engram_runtime.server.tenants import Principal

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/health/startup", "/health", "/openapi.json"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
Observe = Callable[[Scope, int, float], None]
Identify = Callable[[Headers, str | None], Principal | Awaitable[Principal]]


def has_lone_surrogate(body: bytes) -> bool:
    r"""JSON can spell a text that no encoding can (`\ud800`); tokenizers and stores would fail on it much later."""
    if _SURROGATE.search(_PAIR.sub(b"", body)) is None:
        return False
    # What is left may still be an escaped backslash before harmless letters.
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):  # not JSON: the parser's own error says more
        return False
    return False


class RequestContext:
    """Names every request (`x-request-id`, the caller's own when it is sane) and reports status and seconds."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        request_id = wanted if _REQUEST_ID.fullmatch(wanted) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.perf_counter()
        status = 499  # what a caller that went away before the response has: nothing

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            self._observe(scope, status, time.perf_counter() - started)


class Authenticate:
    """Puts the caller's `Principal` into the scope, before a byte of the body is read."""

    def __init__(self, app: ASGIApp, identify: Identify, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._identify = identify
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            client = scope.get("client")
            try:
                found = self._identify(Headers(scope=scope), client[0] if client else None)
                principal = await found if isinstance(found, Awaitable) else found
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


class BodyAndDisconnect:
    """Reads the whole body within a size and a time, then runs the application until it ends or the caller is gone."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(Headers(scope=scope), receive), self._timeout)
        except TimeoutError:
            await ApiError(408, f"the body did not arrive within {self._timeout:g} s").response()(scope, receive, send)
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None and has_lone_surrogate(body):
            await ApiError(400, "the body holds half a surrogate pair, which is no text").response()(
                scope, receive, send
            )
        elif body is not None:
            await self._run(scope, body, receive, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None when the caller went away. ApiError 413 when it is too large."""
        declared = headers.get("content-length", "")
        announced = int(declared) if declared.isdigit() and len(declared) < 20 else 0
        too_large = announced > self._max_bytes
        if too_large and (announced > 4 * self._max_bytes or "expect" in headers):
            raise self._too_large()
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            too_large = too_large or size > self._max_bytes
            if not too_large:
                chunks.append(chunk)
            # What is too large is read on for a while and thrown away: a caller that is still sending would see a
            # broken connection instead of the answer.
            done = not message.get("more_body", False)
            if too_large and (done or size > 4 * self._max_bytes):
                raise self._too_large()
            if done:
                return b"".join(chunks)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="request_too_large")

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        gone = asyncio.Event()
        complete = False
        pending: bytes | None = body

        async def replay() -> Message:
            nonlocal pending
            if pending is not None:
                message = {"type": "http.request", "body": pending, "more_body": False}
                pending = None
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send_watched(message: Message) -> None:
            nonlocal complete
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                complete = True

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        work = asyncio.ensure_future(self._app(scope, replay, send_watched))
        watcher = asyncio.create_task(watch())
        try:
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not complete:
                work.cancel()
                await asyncio.wait({work})
                if not work.cancelled():
                    work.exception()  # nobody is left to tell
                return
            await work
        finally:
            for task in (watcher, work):
                task.cancel()
