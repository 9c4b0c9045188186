"""HTTP clients: one for threads, one per event loop, each in two flavours.

An httpx.AsyncClient belongs to the loop that first used it, so a client shared by two `asyncio.run` calls fails with
"Event loop is closed"; clients are therefore kept per loop, weakly. Addresses that a person gave follow the proxy
variables of the environment; discovered addresses (pods, loopback) never do, because httpx knows no network ranges in
NO_PROXY and would send pod traffic to the proxy. Both honour SSL_CERT_FILE.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import weakref
from urllib.request import getproxies

import httpx

from engram_litellm.pool import PooledTransport

CONNECT_TIMEOUT = 2.0  # seconds; a replica that is there accepts in milliseconds
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=30.0)


class Clients:
    """Made lazily, and again in a forked child: connections of the parent must not be shared."""

    def __init__(self, ca_file: str | None = None) -> None:
        self._ca_file = ca_file
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._sync: dict[tuple[int, bool], httpx.Client] = {}
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, httpx.AsyncClient]] = (
            weakref.WeakKeyDictionary()
        )

    def sync(self, explicit: bool) -> httpx.Client:
        """The client for threads; `explicit`: the address was given by a person."""
        key = (os.getpid(), explicit)
        with self._lock:
            client = self._sync.get(key)
            if client is None:
                client = httpx.Client(limits=_LIMITS, trust_env=explicit, verify=self._verify())
                self._sync[key] = client
            return client

    def on_loop(self, explicit: bool) -> httpx.AsyncClient:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            clients = self._loops.setdefault(loop, {})
            client = clients.get(explicit)
            if client is None:
                # Open connections refer to their loop, so an ended loop would be kept alive by its own clients.
                for ended in [other for other in self._loops if other.is_closed()]:
                    del self._loops[ended]
                if explicit and getproxies():
                    client = httpx.AsyncClient(limits=_LIMITS, trust_env=True, verify=self._verify())
                else:
                    client = httpx.AsyncClient(transport=PooledTransport(self._verify()), trust_env=False)
                clients[explicit] = client
            return client

    def close(self) -> None:
        """Close the clients of threads; those of a loop end with it."""
        with self._lock:
            clients, self._sync = list(self._sync.values()), {}
        for client in clients:
            client.close()

    async def aclose(self) -> None:
        """Close the clients of the running event loop."""
        with self._lock:
            clients = self._loops.pop(asyncio.get_running_loop(), {})
        for client in clients.values():
            await client.aclose()

    def _verify(self) -> ssl.SSLContext:
        """One context for all clients: loading the certificates takes tens of milliseconds."""
        if self._context is None:
            context = httpx.create_ssl_context(trust_env=True)
            if self._ca_file:
                context.load_verify_locations(cafile=self._ca_file)
            self._context = context
        return self._context


def limits(timeout: float | httpx.Timeout | None) -> httpx.Timeout:
    """The time limits of one attempt: LiteLLM gives one number for reading, connecting is always bounded."""
    if isinstance(timeout, httpx.Timeout):
        return timeout
    seconds = 600.0 if timeout is None else float(timeout)
    return httpx.Timeout(seconds, connect=min(CONNECT_TIMEOUT, seconds))
