"""Ports for servers that must know theirs before they start, or have it again after they were killed.

Port 0 would give one of those that the kernel also takes for outgoing connections: between its choice and its use, or
while its server is dead, it may be somebody else's. These are below, each process of a parallel run has its own, and
none is given out twice, for it need not be in use yet.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from functools import cache

LOWEST, HIGHEST = 11000, 31000  # above are those of outgoing connections: 32768 and more on Linux
PROCESSES = 16


def free_port() -> int:
    return free_base([0])


def free_base(offsets: Sequence[int]) -> int:
    """A port that is free on loopback, and so are those that lie `offsets` above it."""
    size = (HIGHEST - LOWEST) // PROCESSES
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
    first = LOWEST + mine * size
    bases, given = range(first, first + size - max(offsets)), _given()
    for base in random.SystemRandom().sample(bases, len(bases)):
        ports = {base + offset for offset in offsets}
        if given.isdisjoint(ports) and all(map(_is_free, ports)):
            given |= ports
            return base
    raise AssertionError("no free ports")


@cache
def _given() -> set[int]:
    """What this process has given out so far."""
    return set()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
