"""The two ASGI applications of an activator: the port that stands in for sleeping models, and the admin port."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from engram_runtime.activator.config import ActivatorConfig, model_of
from engram_runtime.activator.hold import Full, Hold
from engram_runtime.activator.metrics import CONTENT_TYPE, ActivatorMetrics
from engram_runtime.activator.upstream import Broken, NotConnected, RawHeaders, Upstream, end_to_end
from engram_runtime.server.admin_auth import AdminDoor
from engram_runtime.server.errors import ApiError
from engram_runtime.server.tenants import Tenants

log = logging.getLogger("engram.activator")
RETRY_SECONDS = 5
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _Gone(Exception):
    """The client went away."""


class _Draining(Exception):
    """The process is told to stop, and has waited as long as it may."""


class Activator:
    """State of both ports, on one event loop."""

    def __init__(self, config: ActivatorConfig) -> None:
        self.config = config
        self._upstream = Upstream()
        self.hold = Hold(
            lambda name: self._upstream.ready(config.upstream_of(name)),
            max_waiting=config.max_waiting,
            max_held_bytes=config.max_held_bytes,
            poll_seconds=config.poll_seconds,
        )
        self.metrics = ActivatorMetrics(lambda: self.hold.waiting, lambda: self.hold.held_bytes)
        self.inside = 0
        self.draining = False
        self._give_up = asyncio.Event()
        self._door = AdminDoor(Tenants(None), config.admin_accounts)

    async def close(self) -> None:
        await self._upstream.close()

    def drain(self) -> None:
        """Take nothing new; what is inside may finish."""
        self.draining = True

    def give_up(self) -> None:
        """Send the waiting away."""
        self._give_up.set()

    # The port that models have

    async def public(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.inside += 1
        outcome = "failed"
        try:
            outcome = await self._serve(scope, _Body(receive), send)
        finally:
            self.metrics.ended(outcome)
            self.inside -= 1

    async def _serve(self, scope: Scope, body: _Body, send: Send) -> str:
        """The outcome, one of metrics.OUTCOMES."""
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        name = model_of(host)
        if name is None or scope["method"] not in METHODS:
            message = "the first label of Host must be a model's name" if name is None else "this method is not taken"
            await _refuse(send, 404 if name is None else 405, message, "model_not_found")
            return "invalid"
        if self.draining:
            await _refuse(send, 503, "the activator is stopping", "draining", retry=1)
            return "draining"
        started, reply = time.monotonic(), _Reply(send)
        try:
            with self.hold.memory() as take:
                body.begin(take)
                try:
                    await self._until_answered(name, scope, body, reply, started + self.config.deadline)
                finally:
                    await body.end()
        except Full as error:
            problem, outcome = (f"model {name} sleeps and {error}", "full"), "full"
        except TimeoutError:
            problem, outcome = (f"model {name} did not wake up within {self.config.deadline:g} s", "loading"), "timeout"
        except _Draining:
            problem, outcome = ("the activator is stopping", "draining"), "draining"
        except _Gone:
            return "gone"
        except Broken as error:
            if reply.begun:
                raise  # the client must see a broken answer, not a complete one
            problem, outcome = (f"model {name} broke off: {error}", "aborted"), "failed"
        else:
            self.metrics.waited(reply.begun_at - started)
            return "forwarded"
        log.info("model %s: a request is sent away after %.1f s: %s", name, time.monotonic() - started, outcome)
        await _refuse(send, 503, *problem, retry=RETRY_SECONDS)
        return outcome

    async def _until_answered(self, name: str, scope: Scope, body: _Body, reply: _Reply, deadline: float) -> None:
        while True:
            with self.hold.place(name) as ready:
                await self._wait(ready, body, deadline)
            try:
                await self._forward(name, scope, body, reply)
                return
            except NotConnected as error:
                log.info("model %s: the pod went away again: %s", name, error)
                await self._wait(None, body, min(deadline, time.monotonic() + self.config.poll_seconds))

    async def _wait(self, ready: asyncio.Event | None, body: _Body, deadline: float) -> None:
        """Until `ready`, or (None) the deadline. TimeoutError, _Gone, Full, _Draining."""
        waiting = [asyncio.ensure_future(event.wait()) for event in (ready, self._give_up) if event is not None]
        tasks = {*waiting, body.task}
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=max(0.0, deadline - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in waiting:
                task.cancel()
        if body.task in done:
            body.task.result()  # raises: it ends by nothing else
        if self._give_up.is_set():
            raise _Draining
        if ready is not None and not ready.is_set():
            raise TimeoutError

    async def _forward(self, name: str, scope: Scope, body: _Body, reply: _Reply) -> None:
        """The model's answer to the client. NotConnected as long as nothing was sent to anybody."""
        headers = end_to_end(scope["headers"], drop=(b"expect",))
        named = {header for header, _ in scope["headers"]}
        content = body.chunks() if named & {b"content-length", b"transfer-encoding"} else None
        if content is not None and b"content-length" not in named:
            headers.append((b"transfer-encoding", b"chunked"))
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope.get("query_string", b"")
        target = path + b"?" + query if query else path
        base = self.config.upstream_of(name)
        work = asyncio.ensure_future(self._relay(base, scope["method"].encode(), target, headers, content, reply))
        try:
            await asyncio.wait({work, body.task}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and body.task.done() and not reply.complete:
                body.task.result()
            await work
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait({work})

    async def _relay(
        self,
        base: str,
        method: bytes,
        target: bytes,
        headers: RawHeaders,
        content: AsyncIterator[bytes] | None,
        reply: _Reply,
    ) -> None:
        async with self._upstream.send(base, method, target, headers, content) as response:
            await reply.begin(response.status, end_to_end(response.headers))
            async for chunk in response.aiter_stream():
                await reply.more(chunk)
            await reply.end()

    # The admin port

    async def admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD"):
            await _refuse(send, 405, f"{path} does not take {scope['method']}", None)
        elif path == "/waiting":
            client = scope.get("client")
            try:
                await self._door.identify(Headers(scope=scope), client[0] if client else None)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            await _json(send, 200, {"models": self.hold.report()})
        elif path == "/metrics":
            await _answer(send, 200, self.metrics.render(), CONTENT_TYPE)
        elif path in ("/health/live", "/health/startup"):
            await _json(send, 200, {"status": "live", "reason": ""})
        elif path in ("/health", "/health/ready"):
            status = "draining" if self.draining else "ready"
            await _json(send, 503 if self.draining else 200, {"status": status, "reason": ""})
        else:
            await _refuse(send, 404, f"there is no GET {path}", "unknown_url")


class _Body:
    """A request's body, kept until somebody wants it. `task` ends only by raising: the client is gone, or Full."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._held: deque[bytes] = deque()
        self._complete = False
        self._more = asyncio.Event()
        self._take: Callable[[int], None]
        self.task: asyncio.Task[None]

    def begin(self, take: Callable[[int], None]) -> None:
        self._take = take
        self.task = asyncio.create_task(self._read())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        if not self.task.cancelled():
            self.task.exception()  # told already, or of no interest any more

    async def _read(self) -> None:
        while True:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            self._take(len(chunk))
            self._held.append(chunk)
            self._complete = not message.get("more_body", False)
            self._more.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """What has come, then the rest as it comes in. Asked for only when a pod has taken the connection, so that
        nothing need be kept for another try."""
        while True:
            while self._held:
                chunk = self._held.popleft()
                yield chunk
                self._take(-len(chunk))
            if self._complete:
                return
            self._more.clear()
            await self._more.wait()


class _Reply:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.begun_at = 0.0
        self.complete = False

    async def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The next request of this client is to go through the Service again, which leads to the pods by now."""
        self.begun, self.begun_at = True, time.monotonic()
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]}
        )

    async def more(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        self.complete = True  # from now on a client that leaves has got what it came for
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _refuse(send: Send, status: int, message: str, code: str | None, *, retry: int | None = None) -> None:
    """In the shape of the server's own errors."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    headers = [(b"connection", b"close")]
    if retry is not None:
        headers.append((b"retry-after", str(retry).encode()))
    await _json(send, status, body, headers)


async def _json(send: Send, status: int, body: dict[str, Any], headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    await _answer(send, status, json.dumps(body).encode(), "application/json", headers)


async def _answer(
    send: Send, status: int, data: bytes, content_type: str, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    named = [(b"content-type", content_type.encode()), (b"content-length", str(len(data)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": data})
