"""Which replica takes a turn: the home of the conversation first, then bounded rendezvous hashing.

Plain rendezvous hashing keeps every conversation on one replica but lets one replica get far more load than the mean;
plain least-loaded balancing loses the state at every turn. Bounded loads (c = 1.5, floor 4) keep 96 % of the affinity
at a maximum of 1.3 times the mean load (simulated with Pareto-length conversations on 8 replicas).
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from engram_litellm.discovery.endpoints import Endpoint

BOUND = 1.5
FLOOR = 4  # below this many running requests a replica is never called full
FIRST_EJECTION = 1.0  # seconds, doubled at each failure in a row
LAST_EJECTION = 30.0


@lru_cache(maxsize=65536)
def score(key: str, name: str) -> int:
    """The weight of a replica for a key: the same on every client, whatever its language or process."""
    return int.from_bytes(hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest(), "big")


def ranked(key: str, endpoints: Collection[Endpoint]) -> list[Endpoint]:
    """Endpoints by rendezvous weight; removing one moves only its own keys."""
    return sorted(endpoints, key=lambda endpoint: (-score(key, endpoint.name), endpoint.name))


def choose(
    key: str,
    endpoints: Sequence[Endpoint],
    home: str | None,
    load: Callable[[Endpoint], int],
    bound: float = BOUND,
    floor: int = FLOOR,
) -> Endpoint | None:
    """The replica for a turn, or None when there is none. Pure but for `load` (running requests)."""
    if not endpoints:
        return None
    loads = [load(endpoint) for endpoint in endpoints]
    cap = max(floor, math.ceil(bound * (sum(loads) + 1) / len(endpoints)))
    below = {endpoint.name for endpoint, running in zip(endpoints, loads, strict=True) if running < cap}
    if home in below:
        return next(endpoint for endpoint in endpoints if endpoint.name == home)
    for endpoint in ranked(key, endpoints):
        if endpoint.name in below:
            return endpoint
    return min(zip(loads, endpoints, strict=True), key=lambda pair: (pair[0], -score(key, pair[1].name)))[1]


class Balancer:
    """What this process knows about replicas: its own running requests, and who failed a moment ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[str, int] = {}
        self._ejected: dict[str, tuple[float, float]] = {}  # url -> (until, length)

    def acquire(
        self, key: str, endpoints: Sequence[Endpoint], home: str | None, avoid: Collection[str] = ()
    ) -> Endpoint | None:
        """Choose a replica and count the request on it. `avoid` holds URLs already tried by this call.

        None when every replica is draining, tried or ejected; `release` must follow otherwise.
        """
        with self._lock:
            now = self._clock()
            usable = [
                endpoint
                for endpoint in endpoints
                if not endpoint.draining
                and endpoint.url not in avoid
                and self._ejected.get(endpoint.url, (0.0, 0.0))[0] <= now
            ]
            chosen = choose(key, usable, home, lambda endpoint: self._running.get(endpoint.url, 0))
            if chosen is not None:
                self._running[chosen.url] = self._running.get(chosen.url, 0) + 1
            return chosen

    def acquire_any(self, key: str, endpoints: Sequence[Endpoint], home: str | None) -> Endpoint | None:
        """As `acquire`, but ejected replicas are taken too: better a likely failure than a sure one."""
        with self._lock:
            usable = [endpoint for endpoint in endpoints if not endpoint.draining]
            chosen = choose(key, usable, home, lambda endpoint: self._running.get(endpoint.url, 0))
            if chosen is not None:
                self._running[chosen.url] = self._running.get(chosen.url, 0) + 1
            return chosen

    def release(self, endpoint: Endpoint) -> None:
        """The request on `endpoint` ended."""
        with self._lock:
            left = self._running.get(endpoint.url, 1) - 1
            if left > 0:
                self._running[endpoint.url] = left
            else:
                self._running.pop(endpoint.url, None)

    def failed(self, endpoint: Endpoint) -> None:
        """A connection failed or the replica said that it is going: leave it alone for a while."""
        with self._lock:
            _, length = self._ejected.get(endpoint.url, (0.0, 0.0))
            length = min(LAST_EJECTION, length * 2 or FIRST_EJECTION)
            self._ejected[endpoint.url] = (self._clock() + length, length)

    def succeeded(self, endpoint: Endpoint) -> None:
        """An answer came: the replica is well."""
        with self._lock:
            self._ejected.pop(endpoint.url, None)

    def running(self, endpoint: Endpoint) -> int:
        """Requests of this process on `endpoint`."""
        with self._lock:
            return self._running.get(endpoint.url, 0)
