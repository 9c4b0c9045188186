"""The asynchronous engine: streams, drops, several event loops, failure, drain. On the executor of digests."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.errors import CapacityError, EngineDeadError
from tests.support import patience
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import oracle

PROMPT = [3, 1, 4, 1, 5]
LONG = SamplingParams(max_tokens=100)


class Gate:
    """Where the engine waits in each of its steps: closed, it takes no more of them than the test lets it.

    So a request is under way for as long as a test needs that, whoever has the processor meanwhile.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._one = False

    def __call__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._one)
            self._one = False
        time.sleep(0.001)

    def close(self) -> None:
        with self._changed:
            self._open = self._one = False

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def step(self) -> None:
        """One step, now or as soon as there is one to take; one also when this is said again before it was taken."""
        with self._changed:
            self._one = True
            self._changed.notify_all()


class Served:
    """An asynchronous engine and what it stands on."""

    def __init__(self, **options: Any) -> None:
        self.bench = Bench(**{"window": 256, **options})
        self.bench.clock.now = 0.0
        self.gate = Gate()
        self.bench.executor.tick = self.gate
        self.engine = AsyncLLMEngine(self.bench.engine)

    async def under_way(self, count: int = 1) -> None:
        """Until so many requests run. The gate, closed before they were made, stays closed."""
        await until(lambda: self.engine.stats().running == count, self.gate)

    async def collect(self, prompt: list[int], params: SamplingParams, **options: Any) -> list[RequestOutput]:
        return [o async for o in self.engine.generate(None, params, prompt_token_ids=prompt, **options)]


@pytest.fixture
async def served() -> AsyncIterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(**options: Any) -> Served:
        made.append(Served(**options))
        return made[-1]

    yield make
    for one in made:
        one.gate.open()
        await one.engine.aclose()
        if one.engine.error is None:
            one.bench.engine.check_integrity()


async def until(condition: Callable[[], bool], gate: Gate | None = None) -> None:
    """`gate`: closed, and each look that finds the condition unmet lets the engine take one step."""
    deadline = time.monotonic() + patience.SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        if gate is not None:
            gate.step()
        await asyncio.sleep(0.01)


async def test_many_streams_at_once(served: Callable[..., Served]) -> None:
    one = served()
    prompts = [[number, *PROMPT] for number in range(12)]
    results = await asyncio.gather(*(one.collect(p, SamplingParams(max_tokens=7)) for p in prompts))
    for prompt, outputs in zip(prompts, results, strict=True):
        assert outputs[-1].token_ids == oracle(prompt, 7)
        assert [o.finished for o in outputs] == [False] * 6 + [True]


async def test_text_in_and_text_out(served: Callable[..., Served]) -> None:
    one = served()
    text = await one.engine.generate_text("$%&", SamplingParams(max_tokens=3))
    assert text == "".join(chr(33 + t) for t in oracle([3, 4, 5], 3))


async def test_all_sequences_of_a_request_come_on_one_stream(served: Callable[..., Served]) -> None:
    outputs = await served().collect(PROMPT, SamplingParams(n=3, max_tokens=4))
    assert sorted(o.index for o in outputs if o.finished) == [0, 1, 2]


async def test_refusals_reach_the_caller_and_nobody_else(served: Callable[..., Served]) -> None:
    one = served()
    one.gate.close()
    running = asyncio.create_task(one.collect(PROMPT, LONG))
    await one.under_way()
    for prompt, params, error, words in (
        ([1] * 300, LONG, CapacityError, "prompt has 300 tokens"),
        (PROMPT, SamplingParams(logit_bias={5000: 1.0}), ValueError, "logit_bias"),
    ):
        refused = asyncio.create_task(one.collect(prompt, params))
        await until(refused.done, one.gate)
        with pytest.raises(error, match=words):
            await refused
    with pytest.raises(ValueError, match="prompt or prompt_token_ids"):
        await anext(one.engine.generate("a", LONG, prompt_token_ids=[1]))
    assert one.engine.stats().running == 1
    one.gate.open()
    assert len((await running)[-1].token_ids) == 100


async def test_a_request_id_is_used_once_at_a_time(served: Callable[..., Served]) -> None:
    one = served()
    one.gate.close()
    running = asyncio.create_task(one.collect(PROMPT, LONG, request_id="r"))
    await one.under_way()
    with pytest.raises(ValueError, match="in use"):
        await one.collect(PROMPT, LONG, request_id="r")
    one.engine.abort("r")
    one.gate.open()
    assert (await running)[-1].finish_reason == "abort"


@pytest.mark.parametrize("how", ["close", "drop", "cancel"])
async def test_a_consumer_that_goes_away_aborts_its_request(served: Callable[..., Served], how: str) -> None:
    one = served(window=4096, blocks=2048)
    one.gate.close()
    one.gate.step()
    stream: Any = one.engine.generate(None, SamplingParams(), prompt_token_ids=PROMPT)
    await anext(stream)  # what one step brings, and nothing else is on its way
    if how == "close":
        await stream.aclose()
    elif how == "drop":
        del stream
        gc.collect()
    else:
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: one.engine.stats().finished.get("abort") == 1, one.gate)
    assert one.engine.stats().running == 0


async def test_a_failed_step_ends_every_stream_and_the_engine(served: Callable[..., Served]) -> None:
    one = served()
    one.gate.close()
    running = [asyncio.create_task(one.collect([n, *PROMPT], LONG)) for n in range(3)]
    await one.under_way(3)
    one.bench.executor.fail_at = 0
    one.gate.open()
    for result in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(result, EngineDeadError)
        assert "the device caught fire" in str(result)
        assert isinstance(result.__cause__, RuntimeError)
    assert isinstance(one.engine.error, RuntimeError)
    with pytest.raises(EngineDeadError):
        await one.collect(PROMPT, LONG)
    with pytest.raises(EngineDeadError):
        await one.engine.warm(PROMPT, TurnSpec())
    assert not await one.engine.drain(1.0)


async def test_several_event_loops_share_one_engine(served: Callable[..., Served]) -> None:
    one = served()
    results: dict[int, list[int]] = {}

    def other(number: int) -> None:
        async def ask() -> None:
            outputs = await one.collect([number, *PROMPT], SamplingParams(max_tokens=20))
            results[number] = outputs[-1].token_ids

        asyncio.run(ask())

    threads = [threading.Thread(target=other, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    mine = await one.collect(PROMPT, SamplingParams(max_tokens=20))
    await until(lambda: len(results) == 4)
    for thread in threads:
        thread.join()
    assert mine[-1].token_ids == oracle(PROMPT, 20)
    assert results == {number: oracle([number, *PROMPT], 20) for number in range(4)}


async def test_a_loop_that_dies_does_not_take_the_engine_along(served: Callable[..., Served]) -> None:
    one = served(window=4096, blocks=2048)
    one.gate.close()
    kept: list[Any] = []

    def other() -> None:
        async def start() -> None:
            stream = one.engine.generate(None, SamplingParams(), prompt_token_ids=PROMPT)
            kept.append(stream)
            one.gate.step()
            await anext(stream)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(start())
        loop.close()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    one.gate.open()
    await until(lambda: one.engine.stats().finished.get("abort") == 1)
    assert (await one.collect(PROMPT, SamplingParams(max_tokens=2)))[-1].finished


async def test_statistics_from_another_thread_while_it_runs(served: Callable[..., Served]) -> None:
    one = served()
    one.gate.close()
    running = [asyncio.create_task(one.collect([n, *PROMPT], LONG)) for n in range(4)]
    seen = 0

    def look() -> int:
        nonlocal seen
        stats = one.engine.stats()
        seen += len(stats.itl_seconds)
        return stats.running

    await until(lambda: look() == 4, one.gate)
    one.gate.open()
    while not all(task.done() for task in running):
        await asyncio.to_thread(look)
        await asyncio.sleep(0)
    await asyncio.gather(*running)
    look()
    assert seen == 4 * 99


async def test_a_warm_up_reports_and_the_next_turn_finds_it(served: Callable[..., Served]) -> None:
    one = served(snapshots=True)
    outputs = await one.collect(PROMPT, SamplingParams(max_tokens=4), turn=TurnSpec(conversation_id="c"))
    report = outputs[-1].turn
    assert report is not None
    following = [*PROMPT, *outputs[-1].token_ids, 90]
    warmed = await one.engine.warm(following, TurnSpec(conversation_id="c", turn_number=report.turn_number))
    assert (warmed.boundary, warmed.rewarmed_tokens) == ("next_history", 2)
    outputs = await one.collect([*following, 7], SamplingParams(max_tokens=2), turn=TurnSpec(conversation_id="c"))
    assert outputs[-1].turn is not None
    assert outputs[-1].turn.prefilled_tokens == 1


async def test_drain_lets_requests_finish_and_flushes(served: Callable[..., Served]) -> None:
    one = served(snapshots=True)
    one.gate.close()
    running = asyncio.create_task(one.collect(PROMPT, SamplingParams(max_tokens=30), turn=TurnSpec()))
    await one.under_way()
    draining = asyncio.create_task(one.engine.drain(patience.SECONDS))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="draining"):
        await one.collect(PROMPT, LONG)
    assert one.engine.stats().running == 1
    one.gate.open()
    assert await draining
    assert (await running)[-1].finish_reason == "length"
    assert one.bench.snapshots is not None
    assert [c.boundary for c in one.bench.snapshots.saved] == ["turn_end"]


async def test_drain_aborts_what_outlasts_the_deadline(served: Callable[..., Served]) -> None:
    one = served(window=4096, blocks=2048)
    one.gate.close()
    running = asyncio.create_task(one.collect(PROMPT, SamplingParams()))
    await one.under_way()
    draining = asyncio.create_task(one.engine.drain(0.05))
    await until(draining.done, one.gate)
    assert not await draining
    assert (await running)[-1].finish_reason == "abort"


async def test_closing_ends_streams_and_may_be_repeated(served: Callable[..., Served]) -> None:
    one = served(window=4096, blocks=2048)
    one.gate.close()
    running = asyncio.create_task(one.collect(PROMPT, SamplingParams()))
    await one.under_way()
    closing = asyncio.create_task(one.engine.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    one.gate.open()
    await closing
    with pytest.raises(EngineDeadError, match="closed"):
        await running
    await one.engine.aclose()
    with pytest.raises(EngineDeadError, match="closed"):
        await one.collect(PROMPT, LONG)
