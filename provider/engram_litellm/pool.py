"""A connection pool whose cost does not grow with the number of connections.

httpcore's pool looks at every connection for every request and every release, one system call each for the idle ones:
with 50 requests at once that is half of the time of a call. Here idle connections are a stack per origin; the one used
last is taken first, so the others expire. One HTTP/1.1 connection still is httpcore's.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import NoReturn

import httpcore
import httpx

MAX_IDLE = 256  # connections kept per origin
KEEPALIVE = 30.0  # seconds


class PooledTransport(httpx.AsyncBaseTransport):
    """Connections of one event loop, without a limit on how many are in use: LiteLLM's callers bound that."""

    def __init__(self, verify: ssl.SSLContext) -> None:
        self._verify = verify
        self._idle: dict[str, deque[httpcore.AsyncHTTPConnection]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send on an idle connection that is still good, else on a new one. Raises httpx's exceptions."""
        url = httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        )
        idle = self._idle.setdefault(str(url.origin), deque())
        connection = await self._connection(url.origin, idle)
        inner = httpcore.Request(
            request.method.encode(),
            url,
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            response = await connection.handle_async_request(inner)
        except BaseException as error:
            await connection.aclose()
            _translate(error)
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_Body(response, connection, idle),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        """Close what is idle; what is in use closes with its response."""
        stacks, self._idle = list(self._idle.values()), {}
        for stack in stacks:
            while stack:
                await stack.pop().aclose()

    async def _connection(
        self, origin: httpcore.Origin, idle: deque[httpcore.AsyncHTTPConnection]
    ) -> httpcore.AsyncHTTPConnection:
        while idle:
            connection = idle.pop()
            if connection.is_available() and not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(origin, ssl_context=self._verify, keepalive_expiry=KEEPALIVE)


class _Body(httpx.AsyncByteStream):
    """A response's body; closing it gives the connection back if all of it was read, else closes that too."""

    def __init__(
        self,
        response: httpcore.Response,
        connection: httpcore.AsyncHTTPConnection,
        idle: deque[httpcore.AsyncHTTPConnection],
    ) -> None:
        self._response = response
        self._connection = connection
        self._idle = idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._response.aiter_stream():
                yield part
        except Exception as error:
            _translate(error)

    async def aclose(self) -> None:
        await self._response.aclose()
        if self._connection.is_idle() and len(self._idle) < MAX_IDLE:
            self._idle.append(self._connection)
        else:
            await self._connection.aclose()


def _translate(error: BaseException) -> NoReturn:
    """Raise httpx's exception of the same name for one of httpcore's."""
    for kind in type(error).__mro__:
        if kind.__module__.startswith("httpcore"):
            same = getattr(httpx, kind.__name__, None)
            if isinstance(same, type) and issubclass(same, Exception):
                raise same(str(error)) from error
    raise error
