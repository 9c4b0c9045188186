"""An executor that computes nothing and a transfer that moves nothing: what remains of an engine is its host's work."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter, sleep, thread_time

import torch
from torch import Tensor

from engram_runtime.executor.plan import CacheGeometry, Sampled, StepPlan, StepResult
from engram_runtime.snapshots.io.tensors import kv_shape
from tests.support.snapshots import Device

BLOCK = 16


class NoExecutor:
    """Samples for everybody, at once. answer: what every row says, each from a place of its own."""

    steps_ahead = 1
    steps_together = 1

    def __init__(self, *, blocks: int, states: int = 0, window: int = 4096, answer: Sequence[int] = (1,)) -> None:
        self.geometry = CacheGeometry(blocks, BLOCK, states, 1, 1 if states else 0, window)
        self.plans: list[StepPlan] = []
        self.submitted: list[float] = []
        """When (`perf_counter`) each of them came."""
        self.step_seconds = 0.0
        """How long a step takes; the processor has nothing to do meanwhile."""
        self.spent = 0.0
        """Processor seconds that are no work of the engine's."""
        self._answer = answer
        self._waiting: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.submitted.append(perf_counter())
        self.plans.append(plan)
        self._waiting.append(plan)

    def submit_together(self, plans: Sequence[StepPlan]) -> None:
        for plan in plans:
            self.submit(plan)

    def collect(self) -> StepResult:
        if self.step_seconds:
            sleep(self.step_seconds)
        started = thread_time()
        plan, answer = self._waiting.popleft(), self._answer
        sampled = {s.row: Sampled(answer[(s.row * 331 + plan.step) % len(answer)]) for s in plan.sequences if s.sample}
        self.spent += thread_time() - started
        return StepResult(plan.step, sampled, {})

    def close(self) -> None:
        """Nothing is held."""


class NoDevice(Device):
    """Gives zeros and takes anything."""

    def read_kv(self, block_ids: Sequence[int], first: int, count: int) -> Tensor:
        return torch.zeros(kv_shape(self.layout, count), dtype=self.kv.dtype)

    def write(
        self,
        block_ids: Sequence[int],
        kv: Sequence[tuple[int, Tensor]],
        state_slot: int | None,
        state: dict[str, Tensor],
    ) -> int:
        """Nothing is kept."""
        return 0
