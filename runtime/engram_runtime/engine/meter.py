"""Collects what happens for `EngineStats`: counters that grow, observations until somebody reads them."""

from __future__ import annotations

import threading
from collections import Counter, deque

from engram_runtime.engine.request import Request, RestoreOutcome
from engram_runtime.engine.startup import StartUp
from engram_runtime.engine.stats import EngineStats
from engram_runtime.engine.step import ScheduledStep

MAX_OBSERVATIONS = 100_000
"""Kept between two readings; without a reader the oldest are dropped."""
RATE_MEMORY = 0.9


class Meter:
    """Written by the engine thread; `fill` may be called from any."""

    def __init__(self, start: StartUp | None = None) -> None:
        self._start = start or StartUp()
        self._lock = threading.Lock()
        self._ttft, self._itl, self._e2e, self._queue, self._restore = (
            deque[float](maxlen=MAX_OBSERVATIONS) for _ in range(5)
        )
        # Of the step whose tokens are being taken: handed on once, at its end.
        self._new_ttft, self._new_itl = list[float](), list[float]()
        self._finished: Counter[str] = Counter()
        self._restored_tokens: Counter[str] = Counter()
        self._restored_bytes: Counter[str] = Counter()
        self._restore_failures = 0
        self._prompt_tokens = 0
        self._generated = 0
        self._rate: float | None = None

    def step(self, step: ScheduledStep, seconds: float) -> None:
        """The step is over, and so are its tokens."""
        with self._lock:
            self._ttft.extend(self._new_ttft)
            self._itl.extend(self._new_itl)
        self._new_ttft.clear()
        self._new_itl.clear()
        prefill = sum(work.end - work.start for work in step.work if work.end - work.start > 1)
        # A step that has followed a restore has waited for it.
        if prefill >= 16 and seconds > 0 and not step.plan.after:
            rate = prefill / seconds
            self._rate = rate if self._rate is None else RATE_MEMORY * self._rate + (1 - RATE_MEMORY) * rate

    @property
    def prefill_rate(self) -> float | None:
        """Tokens per second, once measured."""
        return self._rate

    def queued(self, seconds: float) -> None:
        with self._lock:
            self._queue.append(seconds)

    def restored(self, outcome: RestoreOutcome) -> None:
        with self._lock:
            self._restore.append(outcome.milliseconds / 1e3)
        self._restore_failures += outcome.error is not None
        if outcome.tier is not None:
            self._restored_tokens[outcome.tier] += outcome.position - outcome.gpu_position
            self._restored_bytes[outcome.tier] += outcome.bytes

    def token(self, now: float, request: Request, index: int) -> None:
        """A token of sequence `index` arrived; `step` is told when all of a step did."""
        self._generated += 1
        if self._generated == 1:
            self._start.mark("first_token")
        first = len(request.sequences[index].output_ids) == 1
        if first and index == 0:
            self._prompt_tokens += len(request.prompt_ids)
        if first:
            self._new_ttft.append(now - request.arrival)
        else:
            self._new_itl.append(now - request.last_token_time[index])
        request.last_token_time[index] = now

    def finished(self, reason: str, seconds: float) -> None:
        self._finished[reason] += 1
        with self._lock:
            self._e2e.append(seconds)

    def fill(self, stats: EngineStats) -> None:
        """Write everything into `stats`; observations are handed over."""
        stats.prompt_tokens, stats.generated_tokens = self._prompt_tokens, self._generated
        stats.finished = dict(self._finished)
        stats.start_seconds = dict(self._start.seconds)
        stats.restored_tokens = dict(self._restored_tokens)
        stats.restored_bytes = dict(self._restored_bytes)
        stats.restore_failures = self._restore_failures
        with self._lock:
            for name in ("ttft", "itl", "e2e", "queue", "restore"):
                observed: deque[float] = getattr(self, f"_{name}")
                setattr(stats, f"{name}_seconds", list(observed))
                observed.clear()
