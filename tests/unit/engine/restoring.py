"""Turns whose history comes back from a store, and a device to which it comes while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.errors import SnapshotError
from engram_runtime.executor.plan import CacheGeometry, StepPlan, StepResult
from tests.support import patience
from tests.unit.engine.fakes import FakeExecutor, oracle

if TYPE_CHECKING:
    from tests.unit.engine.conftest import Bench

FIRST = [90] * 9 + [1, 2, 3]
NEW = 6
HELD = len(FIRST) + NEW - 1
"""Tokens that a turn which continues the first one finds."""


def next_prompt(*tail: int) -> list[int]:
    return [*FIRST, *oracle(FIRST, NEW), 50, 51, *tail]


class Copying(FakeExecutor):
    """Restores come when the step that follows them runs, as late as its results are asked for; others when `there`
    is set, or after `soon` seconds."""

    def __init__(self, sizes: CacheGeometry, *, max_tokens: int = 1 << 30) -> None:
        super().__init__(sizes, max_tokens=max_tokens)
        self.steps_ahead = 1
        self.there = threading.Event()
        self.soon: float = patience.SECONDS
        self.damaged = False
        self.followed: list[int] = []
        self._tickets = 0
        self._coming: dict[int, Callable[[], None]] = {}
        self._mine = threading.local()
        self._lock = threading.Lock()

    def write(
        self,
        block_ids: Sequence[int],
        kv: Sequence[tuple[int, Tensor]],
        state_slot: int | None,
        state: dict[str, Tensor],
    ) -> int:
        damaged = self.damaged
        wrong = 5 if damaged and kv else 0  # the same in both, or the fake device would notice
        pieces = [(first, packed + wrong) for first, packed in kv]
        states = {name: tensor + wrong for name, tensor in state.items()}
        write = super().write
        with self._lock:
            self._tickets += 1
            ticket = self._tickets
        self._coming[ticket] = lambda: (write(block_ids, pieces, state_slot, states), None)[1]
        self._mine.ticket, self._mine.damaged = ticket, damaged
        return ticket

    def _arrive(self, ticket: int) -> None:
        with self._lock:
            come = self._coming.pop(ticket, None)
            if come is not None:
                come()

    def run(self, plan: StepPlan) -> None:
        if plan.after:
            self.followed.append(plan.after)
            self._arrive(plan.after)

    def collect(self) -> StepResult:
        plan = self.plans[0]
        self.run(plan)
        result = super().collect()
        if plan.after:
            self.there.set()
        return result

    def settle(self) -> None:
        ticket = getattr(self._mine, "ticket", 0)
        if ticket:
            self.there.wait(self.soon)
            self._arrive(ticket)
            self._mine.ticket = 0
            if self._mine.damaged:
                raise SnapshotError("the bytes are damaged")


class Waiting(Copying):
    """A device that is waited for after each step."""

    def __init__(self, sizes: CacheGeometry, *, max_tokens: int = 1 << 30) -> None:
        super().__init__(sizes, max_tokens=max_tokens)
        self.steps_ahead = 0


def ask(one: Bench, prompt: list[int], **turn: Any) -> RequestOutput:
    one.engine.add_request("r", prompt, SamplingParams(max_tokens=NEW), turn=TurnSpec(**turn))
    output = one.run()["r", 0]
    assert output.token_ids == oracle(prompt, NEW), "a restore changed the answer"
    return output


def report_of(output: RequestOutput) -> TurnReport:
    assert output.turn is not None
    return output.turn


def device_of(one: Bench) -> Copying:
    assert isinstance(one.executor, Copying)
    return one.executor


def until_copies(one: Bench, count: int) -> None:
    """Until that many restores are on their way, and the engine was told; nothing is computed meanwhile."""
    assert one.engine._restorer is not None
    deadline = time.monotonic() + patience.SECONDS
    while len(device_of(one)._coming) < count:
        assert time.monotonic() < deadline, "restores do not begin"
        one.engine.wait(0.01)
        one.engine._poll()


def start(one: Bench) -> None:
    """Until the step that follows the copy was submitted."""
    one.engine.add_request("r", next_prompt(52), SamplingParams(max_tokens=NEW), turn=TurnSpec())
    while not device_of(one).plans:
        one.engine.step()
        if one.engine.idle:
            one.engine.wait(0.2)
    assert device_of(one).plans[0].after == 1
