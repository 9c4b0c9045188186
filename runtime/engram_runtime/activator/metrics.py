"""What an activator counts. No metric carries a model's name: it comes from a header that anybody may write."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WAITS = (0.05, 0.25, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OUTCOMES = ("forwarded", "timeout", "full", "draining", "gone", "failed", "invalid")


class ActivatorMetrics:
    def __init__(self, waiting: Callable[[], int], held_bytes: Callable[[], int]) -> None:
        registry = self._registry = CollectorRegistry(auto_describe=False)
        requests = Counter("engram_activator_requests", "Requests, by how they ended.", ("outcome",), registry=registry)
        self._outcomes = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self._wait = Histogram(
            "engram_activator_wait_seconds",
            "From the arrival of a request until its model took it.",
            buckets=_WAITS,
            registry=registry,
        )
        Gauge("engram_activator_waiting", "Requests held.", registry=registry).set_function(waiting)
        Gauge("engram_activator_held_bytes", "Bytes of their bodies.", registry=registry).set_function(held_bytes)

    def ended(self, outcome: str) -> None:
        """`outcome` is one of OUTCOMES."""
        self._outcomes[outcome].inc()

    def waited(self, seconds: float) -> None:
        self._wait.observe(seconds)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)
