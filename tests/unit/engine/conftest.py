"""Engines over the executor of digests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.outputs import Collector, RequestOutput
from tests.support import patience
from tests.unit.engine.fakes import VOCAB, FakeExecutor, FakeSnapshots, Letters, geometry
from tests.unit.engine.restoring import FIRST, ask


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """An engine with its fake executor, fake snapshots and clock."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        states: int = 0,
        window: int = 128,
        seqs: int = 4,
        budget: int = 32,
        swap: int = 1 << 20,
        snapshots: bool = False,
        eos: frozenset[int] = frozenset(),
        store: FakeSnapshots | None = None,
        executor: type[FakeExecutor] = FakeExecutor,
        service: type[FakeSnapshots] = FakeSnapshots,
        **config: Any,
    ) -> None:
        self.executor = executor(
            geometry(blocks=blocks, block_size=block_size, states=states, window=window), max_tokens=budget
        )
        self.clock = Clock()
        self.snapshots = service(self.executor) if snapshots or store is not None else None
        if self.snapshots is not None and store is not None:
            self.snapshots.stored = store.stored
        self.engine = LLMEngine(
            EngineConfig(
                "fake",
                max_num_seqs=seqs,
                max_num_batched_tokens=budget,
                swap_bytes=swap,
                seed=0,
                progress=False,
                **config,
            ),
            self.executor,
            vocab_size=VOCAB,
            tokenizer=Letters(),
            eos_ids=eos,
            snapshots=self.snapshots,  # type: ignore[arg-type]  # only the engine's part of the protocol
            transfer=self.executor,
            clock=self.clock,
        )

    def run(self, limit: int = 5000) -> dict[tuple[str, int], RequestOutput]:
        """Step until everything is done; finished outputs by request id and index."""
        collector = Collector()
        for _ in range(limit):
            if not self.engine.has_unfinished_requests:
                break
            for output in self.engine.step():
                collector.add(output)
            if self.engine.idle and self.engine.has_unfinished_requests:
                self.engine.wait(0.2)
        assert not self.engine.has_unfinished_requests, "a request did not end"
        self.engine.check_integrity()
        return collector.finished

    def settle(self) -> None:
        """Until no restore is under way: one that was abandoned holds blocks until its worker thread is back."""
        assert self.engine._restorer is not None
        deadline = time.monotonic() + patience.SECONDS
        while self.engine._restorer._jobs:
            assert time.monotonic() < deadline, "a restore does not end"
            self.engine.wait(0.01)
            self.engine.step()

    def after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.engine.step()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.fixture(params=[0, 16], ids=["dense", "recurrent"])
def states(request: pytest.FixtureRequest) -> int:
    """State slots of a model."""
    count: int = request.param
    return count


@pytest.fixture
def stored(bench: Callable[..., Bench], states: int) -> FakeSnapshots:
    """A store with one turn in it: 12 prompt tokens and 5 of 6 generated ones."""
    one = bench(states=states, snapshots=True)
    ask(one, FIRST, conversation_id="c")
    one.after(1.0)
    assert one.snapshots is not None
    assert len(one.snapshots.stored) == 1
    return one.snapshots
