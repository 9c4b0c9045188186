"""Sockets and servers of a process that has several ports and one life."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn


class Uvicorn(uvicorn.Server):
    """Signals belong to the process, not to one of its ports."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """ValueError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio switches Nagle's algorithm off for what is accepted here; with 0 it does not, and
    # every answer waits 40 ms for a delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ValueError(f"port {port} on {host} cannot be used: {error.strerror or error}") from error
    sock.listen(2048)
    sock.setblocking(False)
    return sock
