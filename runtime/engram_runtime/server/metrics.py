"""Prometheus metrics, in a registry of their own so that two servers can live in one process.

Names follow those of other inference servers where the meaning is the same (docs/metrics.md lists them all). What the
engine and the snapshot service count themselves is read at scrape time; what happens at the HTTP edge is observed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.types import Scope

from engram_runtime.engine.stats import EngineStats
from engram_runtime.snapshots.types import TierStatus

if TYPE_CHECKING:
    from engram_runtime.engine.async_engine import AsyncLLMEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SLOW = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# metric, field of EngineStats, help
_GAUGES = (
    ("engram_num_requests_running", "running", "Sequences in the running batch."),
    ("engram_num_requests_waiting", "waiting", "Requests waiting for a place in the batch."),
    ("engram_num_requests_restoring", "restoring", "Requests whose snapshot is being fetched."),
    ("engram_num_requests_swapped", "swapped", "Requests preempted to host memory."),
    ("engram_num_background_requests", "background", "Rewarm requests, which yield to all others."),
    ("engram_kv_blocks_used", "blocks_used", "KV blocks held by requests, leases or saves."),
    ("engram_kv_blocks_cached", "blocks_cached", "KV blocks that hold a reusable prefix and may be evicted."),
    ("engram_kv_blocks_total", "blocks_total", "KV blocks of the pool."),
    ("engram_state_slots_used", "states_used", "Recurrent-state slots in use."),
    ("engram_state_slots_total", "states_total", "Recurrent-state slots of the pool."),
)
_COUNTERS = (
    ("engram_engine_steps", "steps", "Steps the engine has run."),
    ("engram_prompt_tokens", "prompt_tokens", "Prompt tokens of all requests, restored ones included."),
    ("engram_generation_tokens", "generated_tokens", "Tokens generated."),
    ("engram_prefilled_tokens", "prefilled_tokens", "Prompt tokens computed in the foreground."),
    ("engram_rewarmed_tokens", "rewarmed_tokens", "Tokens computed in the background for the next turn."),
    ("engram_recomputed_tokens", "recomputed_tokens", "Tokens computed again after a preemption."),
    ("engram_prefix_cache_hits", "prefix_hit_tokens", "Prompt tokens found in GPU memory."),
    ("engram_restore_failures", "restore_failures", "Restores that fell back to prefill."),
    ("engram_saves_requested", "saves_requested", "Boundaries handed to the snapshot service."),
    ("engram_saves_superseded", "saves_superseded", "Boundaries replaced by a better one before they were written."),
)
_LABELLED = (
    ("engram_restored_tokens", "restored_tokens", "tier", "Prompt tokens taken over from a tier."),
    ("engram_restored_bytes", "restored_bytes", "tier", "Bytes read from a tier by restores."),
    ("engram_request_success", "finished", "finished_reason", "Sequences that ended, by reason."),
)
_HISTOGRAMS = (
    ("engram_time_to_first_token_seconds", "ttft_seconds", _FAST, "From arrival to the first token."),
    ("engram_time_per_output_token_seconds", "itl_seconds", _FAST, "Between two tokens of a sequence."),
    ("engram_e2e_request_latency_seconds", "e2e_seconds", _SLOW, "From arrival to the last token."),
    ("engram_request_queue_time_seconds", "queue_seconds", _FAST, "From arrival to the first step."),
    ("engram_restore_seconds", "restore_seconds", _FAST, "Time of a restore, all tiers."),
)


class Metrics:
    """Everything the server measures. Call it from one event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._http = Counter(
            "engram_http_requests", "HTTP requests.", ("method", "route", "status"), registry=self.registry
        )
        self._http_seconds = Histogram(
            "engram_http_request_seconds", "Time of HTTP requests.", ("route",), buckets=_SLOW, registry=self.registry
        )
        self._boundary_errors = Counter(
            "engram_boundary_errors",
            "Boundaries not located because the chat template refused a probe.",
            ("boundary",),
            registry=self.registry,
        )
        self._rewarm = Counter(
            "engram_rewarm_requests",
            "Background renders of the next turn's history.",
            ("result",),
            registry=self.registry,
        )
        self._histograms = [
            (field, Histogram(name, text, buckets=buckets, registry=self.registry))
            for name, field, buckets, text in _HISTOGRAMS
        ]

        self._collector: _EngineCollector | None = None

    def attach(self, engine: AsyncLLMEngine, inside: Callable[[], int]) -> None:
        """From now on scrapes include the engine and its snapshot service."""
        self._collector = _EngineCollector(engine, inside)
        self.registry.register(self._collector)

    def observe_http(self, scope: Scope, status: int, seconds: float) -> None:
        # The route's template, not the path: paths hold ids, and each would be a time series.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._http.labels(scope["method"] if status != 405 else "other", route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def boundary_error(self, boundary: str) -> None:
        self._boundary_errors.labels(boundary).inc()

    def rewarm(self, result: str) -> None:
        self._rewarm.labels(result).inc()

    def stats(self) -> EngineStats:
        """A reading of the engine, whose observations go into the histograms: nobody else may take them."""
        if self._collector is None:
            return EngineStats()
        stats = self._collector.read()
        for name, histogram in self._histograms:
            for value in getattr(stats, name):
                histogram.observe(value)
        return stats

    def render(self) -> bytes:
        """Prometheus text format. Reads the engine once, so that all numbers of a scrape are of one moment."""
        self.stats()
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncLLMEngine, inside: Callable[[], int]) -> None:
        self._engine = engine
        self._inside = inside
        self._stats = EngineStats()

    def read(self) -> EngineStats:
        self._stats = self._engine.stats()
        return self._stats

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        for name, attribute, text in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, attribute))
        yield GaugeMetricFamily("engram_sequences_admitted", "Sequences running or waiting.", value=self._inside())
        start = GaugeMetricFamily(
            "engram_start_seconds", "From the start of the process until this was over.", labels=("phase",)
        )
        for phase, seconds in stats.start_seconds.items():
            start.add_metric((phase,), seconds)
        yield start
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield GaugeMetricFamily("engram_kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", value=usage)
        for name, attribute, text in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, attribute))
        for name, attribute, label, text in _LABELLED:
            family = CounterMetricFamily(name, text, labels=(label,))
            for key, value in sorted(getattr(stats, attribute).items()):
                family.add_metric((key,), value)
            yield family
        preemptions = CounterMetricFamily("engram_num_preemptions", "Preemptions, by how they end.", labels=("how",))
        preemptions.add_metric(("swapped",), stats.preemptions_swapped)
        preemptions.add_metric(("recomputed",), stats.preemptions_recomputed)
        yield preemptions
        yield from self._snapshots()

    def _snapshots(self) -> Iterator[Metric]:
        service = self._engine.snapshots
        if service is None:
            return
        counters = CounterMetricFamily("engram_snapshot_events", "What the snapshot service counts.", labels=("event",))
        for key, value in sorted(service.counters().items()):
            counters.add_metric((key,), value)
        yield counters
        yield from tier_metrics(service.status())


def tier_metrics(tiers: Iterable[TierStatus]) -> Iterator[Metric]:
    ready = GaugeMetricFamily("engram_tier_ready", "1 when the tier works.", labels=("tier", "reason"))
    size = GaugeMetricFamily("engram_tier_bytes", "Bytes held by the tier.", labels=("tier",))
    capacity = GaugeMetricFamily("engram_tier_capacity_bytes", "Budget of the tier.", labels=("tier",))
    objects = GaugeMetricFamily("engram_tier_objects", "Objects held by the tier.", labels=("tier",))
    for tier in tiers:
        ready.add_metric((tier.name, tier.reason), float(tier.ready))
        size.add_metric((tier.name,), tier.bytes)
        objects.add_metric((tier.name,), tier.objects)
        if tier.capacity is not None:
            capacity.add_metric((tier.name,), tier.capacity)
    yield from (ready, size, capacity, objects)
