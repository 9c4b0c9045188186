"""A small Kubernetes API server over HTTP, in a thread of its own: a KubeStore, watches, and ways to misbehave.

    with MiniApi() as api:
        api.user.put({...})           # as a user or kubelet, never failing
        api.fail(503, "list", PODS, times=3)
        api.drop_watches()            # connections break
        api.forget_history()          # later watches from before now are answered 410
        with api.away(): ...          # nothing listens

For tests of the client and of kopf. Real where they depend on it; what it does not have is said in kube_store.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web
from kubernetes.aio import client

from engram_operator.kube.client import Object
from engram_operator.kube.errors import Unavailable
from engram_operator.kube.kinds import Kind
from tests.support.fake_kube import Failure, FakeKube, StoreTransport
from tests.support.kube_store import Change, KubeStore, Refused, Request
from tests.support.ports import free_port

BOOKMARK_S = 2.0


class MiniApi:
    """`token`: what bearers must present, None for anyone. `hang_s`: how long a request with a Failure of status 0
    stays without an answer before its connection breaks."""

    def __init__(self, store: KubeStore | None = None, token: str | None = None) -> None:
        self.store = store or KubeStore()
        self.user = FakeKube(self.store, follow=False)
        self.token = token
        self.hang_s = 0.0
        self.oldest = 0  # resourceVersion; history before it is forgotten
        self.gone_as_status = False  # answer 410 as the response's status and not within the stream
        self.watches_opened: list[str] = []
        self._network = StoreTransport(self.store)
        self.failures = self._network.failures
        self._wakers: set[asyncio.Event] = set()
        self._streams: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="miniapi", daemon=True)
        self._runner: web.AppRunner | None = None
        self.port = free_port()  # it is listened on again after the server was away
        self.store.listeners.append(self._changed)

    # What a test does

    def __enter__(self) -> MiniApi:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(240)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def load(self) -> Any:
        """A configuration for the client: what a kubeconfig for this server would give."""
        loaded = client.Configuration()
        loaded.host = self.url
        if self.token is not None:
            loaded.api_key["BearerToken"] = f"bearer {self.token}"
        return loaded

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig file for this server."""
        user = {"token": self.token} if self.token else {}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_text(json.dumps(document))
        return path

    def fail(self, status: int, verb: str | None = None, kind: Kind | None = None, **more: Any) -> Failure:
        """Answer matching requests with this status; 0 hangs for `hang_s` and then breaks the connection."""
        failure = Failure(status, verb, kind, **more)
        self.failures.append(failure)
        return failure

    def drop_watches(self) -> None:
        """Break every watch's connection, in the middle of a line if need be."""
        self._call(self._break_streams())

    def forget_history(self) -> None:
        """Watches from before now are answered 410 from now on, as after a compaction."""
        self.oldest = self.store.version

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Nothing listens, and what was connected is cut off."""
        self._call(self._close())
        try:
            yield
        finally:
            self._call(self._listen())

    # The server

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(240)

    def _changed(self, change: Change) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the test is over
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.set()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _close(self) -> None:
        await self._break_streams()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _break_streams(self) -> None:
        for transport in self._streams:
            transport.abort()
        self._wake()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body: Object | None = json.loads(await request.read() or b"null")
        if (
            self.token is not None
            and request.headers.get("Authorization", "").lower() != f"bearer {self.token}".lower()
        ):
            refused = Refused(401, "Unauthorized", "Unauthorized")
            return web.json_response(refused.payload(), status=401)
        try:
            if request.query.get("watch") == "true":
                return await self._watch(request)
            content_type = request.headers.get("Content-Type", "application/json")
            answer = await self._network.send(request.method, request.path, request.query, body, content_type)
        except Refused as refused:
            return web.json_response(refused.payload(), status=refused.status)
        except Unavailable:
            return await self._break(request)
        headers = {"Retry-After": "1"} if answer.status == 429 else {}
        return web.json_response(answer.payload, status=answer.status, headers=headers)

    async def _break(self, request: web.Request) -> web.StreamResponse:
        """No answer, for a while, and then no connection."""
        await asyncio.sleep(self.hang_s)
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        kind, namespace, _, _ = self.store.resolve(request.path)
        asked = Request("watch", kind, namespace, "")
        self.store.requests.append(asked)
        self.store.intercept(asked)
        self.watches_opened.append(kind.plural)
        since = int(request.query.get("resourceVersion") or 0)
        gone = Refused(410, "Expired", f"too old resource version: {since} ({self.oldest})")
        if since < self.oldest and self.gone_as_status:
            raise gone
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            return response
        self._streams.add(transport)
        waker = asyncio.Event()
        self._wakers.add(waker)
        try:
            if since < self.oldest:
                await self._line(response, "ERROR", gone.payload())
            else:
                await self._stream(request, response, kind, namespace, since, waker)
        except ConnectionError:
            pass
        finally:
            self._wakers.discard(waker)
            self._streams.discard(transport)
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        kind: Kind,
        namespace: str,
        since: int,
        waker: asyncio.Event,
    ) -> None:
        matches = self.store.matching(kind, namespace, request.query)
        end = self._loop.time() + float(request.query.get("timeoutSeconds") or 3600)
        position = 0
        while self._loop.time() < end and request.transport is not None and not request.transport.is_closing():
            waker.clear()
            for change in self.store.history[position:]:
                position += 1
                if change.version <= since or change.kind != kind:
                    continue
                now = change.type != "DELETED" and matches(change.object)
                before = change.before is not None and matches(change.before)
                if now:
                    await self._line(response, "MODIFIED" if before else "ADDED", change.object)
                elif before:  # deleted, or it no longer matches the selector, which looks the same
                    await self._line(response, "DELETED", change.object)
            try:
                await asyncio.wait_for(waker.wait(), min(BOOKMARK_S, max(0.0, end - self._loop.time())))
            except TimeoutError:
                metadata = {"resourceVersion": str(self.store.version)}
                mark = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
                await self._line(response, "BOOKMARK", mark)

    @staticmethod
    async def _line(response: web.StreamResponse, type_: str, obj: Object) -> None:
        await response.write(json.dumps({"type": type_, "object": obj}).encode() + b"\n")
