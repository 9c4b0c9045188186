"""Numbers about the operator itself, in a registry of their own, and the small server that shows them.

/healthz says whether a restart would help, /readyz whether this replica can do its part, /metrics how it goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    exposition,
)

from engram_operator.kube.cache import Cache
from engram_operator.kube.kinds import Kind
from engram_operator.kube.queue import KeyedQueue

DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CANARY_S = 90.0
NAMESPACE = "engram_operator"


@dataclass(slots=True)
class Metrics:
    """All names begin with `engram_operator_`."""

    registry: CollectorRegistry = field(default_factory=lambda: CollectorRegistry(auto_describe=True))
    reconciles: Counter = field(init=False)
    seconds: Histogram = field(init=False)
    writes: Counter = field(init=False)
    missed: Counter = field(init=False)
    leader: Gauge = field(init=False)

    def __post_init__(self) -> None:
        ns, registry = NAMESPACE, self.registry
        text = "Reconciles by outcome: ok or error."
        self.reconciles = Counter("reconciles", text, ["controller", "outcome"], namespace=ns, registry=registry)
        text = "Duration of a reconcile."
        self.seconds = Histogram(
            "reconcile_seconds", text, ["controller"], namespace=ns, registry=registry, buckets=DURATIONS
        )
        text = "Writes that the API server took."
        self.writes = Counter("writes", text, ["kind", "verb"], namespace=ns, registry=registry)
        text = "Changes that no watch event told of."
        self.missed = Counter("missed_events", text, ["kind"], namespace=ns, registry=registry)
        self.leader = Gauge("leader", "1 while this replica leads.", namespace=ns, registry=registry)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def wrote(self, kind: Kind, verb: str) -> None:
        self.writes.labels(kind.kind, verb).inc()

    def watch_queue(self, queue: KeyedQueue[tuple[str, str, str]]) -> None:
        """Read the queue's state whenever metrics are asked for."""
        self._gauge("queue_depth", "Keys that are due and not worked on.", lambda: queue.depth)
        self._gauge("queue_oldest_seconds", "How long the longest waiting due key has waited.", lambda: queue.oldest_s)
        self._gauge("queue_failing", "Keys whose last reconcile failed.", lambda: queue.backing_off)

    def watch_cache(self, cache: Cache, kinds: Iterable[Kind]) -> None:
        objects = Gauge("objects", "Objects known.", ["kind"], namespace=NAMESPACE, registry=self.registry)

        def count(kind: Kind) -> Callable[[], float]:
            return lambda: cache.counts().get(kind, 0)

        for kind in kinds:
            objects.labels(kind.kind).set_function(count(kind))

    def watch_canary(self, canary: Canary) -> None:
        self._gauge("watch_age_seconds", "Since a watch event of the own lease was seen.", lambda: canary.age_s)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(name, text, namespace=NAMESPACE, registry=self.registry).set_function(read)


@dataclass(slots=True)
class Canary:
    """The leader renews its lease every few seconds, so its watch must show that. A watch can die without an error,
    and an operator that hears nothing looks exactly like one that has nothing to do."""

    limit_s: float = CANARY_S
    clock: Callable[[], float] = time.monotonic
    _heard: float | None = None
    _dead: str = ""

    def start(self) -> None:
        """From now on, events are expected."""
        self._heard = self.clock()

    def heard(self) -> None:
        """A watch event of the own lease."""
        self._heard = self.clock()

    def condemn(self, why: str) -> None:
        """Somebody else found a watch dead."""
        self._dead = why

    @property
    def age_s(self) -> float:
        return 0.0 if self._heard is None else self.clock() - self._heard

    @property
    def trouble(self) -> str:
        """Why a restart would help, "" when all is well."""
        if self._dead:
            return self._dead
        return f"no watch event for {self.age_s:.0f} s" if self.age_s > self.limit_s else ""


@dataclass(slots=True)
class HealthServer:
    """`unhealthy` and `unready` say why not, or ""."""

    metrics: Metrics
    unhealthy: Callable[[], str]
    unready: Callable[[], str]
    _runner: web.AppRunner | None = None

    async def start(self, port: int) -> int:
        """Listen on all addresses; for port 0 on a free port of this machine. Returns the port."""
        app = web.Application()
        app.router.add_get("/healthz", lambda request: self._state(self.unhealthy()))
        app.router.add_get("/readyz", lambda request: self._state(self.unhealthy() or self.unready()))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, None if port else "127.0.0.1", port).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @staticmethod
    async def _state(trouble: str) -> web.Response:
        return web.Response(status=503 if trouble else 200, text=(trouble or "ok") + "\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = exposition.choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self.metrics.registry), headers={"Content-Type": content_type})
