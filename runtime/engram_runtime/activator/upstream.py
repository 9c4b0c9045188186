"""Requests to a model's pods: bytes as they come, both ways, and nothing left behind when either side goes away.

httpcore, not httpx: a proxy must not add, decode or normalise anything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpcore

RawHeaders = list[tuple[bytes, bytes]]
CONNECT_SECONDS = 2.0
PROBE_SECONDS = 3.0
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


class NotConnected(Exception):
    """No pod took the connection: nothing was sent, so the request may be sent again."""


class Broken(Exception):
    """The connection broke off after the request was on its way."""


def end_to_end(headers: Iterable[tuple[bytes, bytes]], drop: Iterable[bytes] = ()) -> RawHeaders:
    """Without what is meant for the next hop only."""
    found = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in found if name == b"connection" for word in value.split(b",")}
    unwanted = _HOP_BY_HOP | named | set(drop)
    return [(name, value) for name, value in found if name not in unwanted]


class Upstream:
    """For one event loop."""

    def __init__(self) -> None:
        # Pods come and go: a connection kept from the last one would fail once for nothing.
        self._pool = httpcore.AsyncConnectionPool(max_connections=None, max_keepalive_connections=0)

    async def ready(self, base: str) -> bool:
        """Whether a pod answers that it takes turns."""
        try:
            async with self._pool.stream(
                "GET",
                base + "/health/ready",
                headers={"host": urlsplit(base).netloc},
                extensions=_timeouts(PROBE_SECONDS),
            ) as response:
                return bool(response.status == 200)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError):
            return False

    @asynccontextmanager
    async def send(
        self, base: str, method: bytes, target: bytes, headers: RawHeaders, body: AsyncIterator[bytes] | None
    ) -> AsyncIterator[httpcore.Response]:
        """One request; leaving early closes the connection, which aborts the turn. NotConnected, Broken."""
        parts = urlsplit(base)
        url = httpcore.URL(scheme=b"http", host=(parts.hostname or "").encode(), port=parts.port, target=target)
        try:
            async with self._pool.stream(
                method, url, headers=headers, content=body, extensions=_timeouts(None)
            ) as found:
                yield found
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            raise NotConnected(str(error)) from error
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            raise Broken(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        await self._pool.aclose()


def _timeouts(read: float | None) -> dict[str, dict[str, float | None]]:
    """A long prefill sends nothing for a while; connecting is quick or does not happen."""
    return {"timeout": {"connect": CONNECT_SECONDS, "read": read, "write": 60.0, "pool": None}}
