"""From the engine's thread to its readers: one wake-up a loop and step, nothing lost, nothing for the wrong reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.sampling_params import SamplingParams
from tests.support import patience
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import oracle

SEQS, NEW = 6, 9


async def tokens(engine: AsyncLLMEngine, prompt: list[int]) -> list[int]:
    found: list[int] = []
    async for output in engine.generate(None, SamplingParams(max_tokens=NEW), prompt_token_ids=prompt):
        found += output.new_token_ids
        assert output.token_ids == found
    return found


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    return bench(seqs=SEQS, budget=64)


async def test_a_loop_is_woken_once_a_step(one: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    woken: list[int] = []
    call_soon = loop.call_soon_threadsafe

    def counted(*args: object, **options: object) -> asyncio.Handle:
        if threading.current_thread().name == "engram-engine":
            woken.append(len(one.executor.history))
        return call_soon(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    everybody = threading.Event()
    one.executor.tick = lambda: everybody.wait(patience.SECONDS) and None
    async with AsyncLLMEngine(one.engine) as engine:
        prompts = [[number, 3, 1, 4] for number in range(SEQS)]
        tasks = [asyncio.create_task(tokens(engine, prompt)) for prompt in prompts]
        await asyncio.sleep(0)  # each of them has asked by then
        everybody.set()
        assert await asyncio.gather(*tasks) == [oracle(prompt, NEW) for prompt in prompts]
    assert len(woken) == len(set(woken)), "a step woke the loop more than once"
    # Whoever asked while the first step was under way comes a step later than the others.
    assert NEW <= len(woken) <= NEW + 1


async def test_loops_that_share_an_engine_get_their_own_outputs(one: Bench) -> None:
    answers: dict[int, list[int]] = {}

    async with AsyncLLMEngine(one.engine) as engine:

        def elsewhere(number: int) -> None:
            answers[number] = asyncio.run(tokens(engine, [number, 1, 5]))

        threads = [threading.Thread(target=elsewhere, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        mine = await tokens(engine, [9, 1, 5])
        for thread in threads:
            await asyncio.to_thread(thread.join, patience.SECONDS)
    assert mine == oracle([9, 1, 5], NEW)
    assert answers == {number: oracle([number, 1, 5], NEW) for number in range(3)}


async def test_a_reader_that_is_slow_loses_nothing_and_delays_nobody(one: Bench) -> None:
    async with AsyncLLMEngine(one.engine) as engine:
        stream = engine.generate(None, SamplingParams(max_tokens=NEW), prompt_token_ids=[7, 7])
        first = await anext(stream)
        assert await tokens(engine, [8, 8]) == oracle([8, 8], NEW)
        rest = [output async for output in stream]
    assert [token for output in (first, *rest) for token in output.new_token_ids] == oracle([7, 7], NEW)
    assert [output.finished for output in rest] == [False] * (NEW - 2) + [True]


async def test_a_reader_that_is_cancelled_while_it_waits_aborts_its_request_only(one: Bench) -> None:
    hold = threading.Event()
    one.executor.tick = lambda: hold.wait(patience.SECONDS) and None
    async with AsyncLLMEngine(one.engine) as engine:
        waiting = asyncio.create_task(tokens(engine, [1, 2]))
        other = asyncio.create_task(tokens(engine, [3, 4]))
        await asyncio.sleep(0)  # both have asked by then
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        hold.set()
        assert await other == oracle([3, 4], NEW)
    assert one.engine.stats().finished == {"abort": 1, "length": 1}
