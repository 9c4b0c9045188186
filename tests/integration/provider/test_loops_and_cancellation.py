"""Event loops, threads, batches and callers that go away."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import litellm
import pytest

import engram_litellm
from tests.integration.provider.styles import HI, ask
from tests.support.fake_openai import FakeEngine, Fault


def test_many_event_loops_one_after_another(engine: FakeEngine) -> None:
    for _ in range(4):
        assert ask("async", api_base=engine.url).text == "hello world"
        assert ask("astream", api_base=engine.url).text == "hello world"


def test_clients_of_ended_loops_are_dropped(engine: FakeEngine) -> None:
    for _ in range(4):
        ask("async", api_base=engine.url)
    gc.collect()
    clients = engram_litellm.engram._clients
    assert clients is not None
    assert len(clients._loops) <= 1


def test_event_loops_in_parallel_threads(engine: FakeEngine) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda style: ask(style, api_base=engine.url).text, ["async", "astream", "sync"] * 4))
    assert texts == ["hello world"] * 12


async def test_many_calls_at_once(engine: FakeEngine) -> None:
    calls = [litellm.acompletion(model="engram/m", messages=HI, api_base=engine.url) for _ in range(50)]
    answers = await asyncio.gather(*calls)
    assert [answer.choices[0].message.content for answer in answers] == ["hello world"] * 50


def test_batch_completion(engine: FakeEngine) -> None:
    messages = [[{"role": "user", "content": f"q{i}"}] for i in range(6)]
    answers = litellm.batch_completion(model="engram/m", messages=messages, api_base=engine.url)
    assert [answer.choices[0].message.content for answer in answers] == ["hello world"] * 6
    assert sorted(body["messages"][0]["content"] for body in engine.chats()) == [f"q{i}" for i in range(6)]


def test_text_completion(engine: FakeEngine) -> None:
    answer = litellm.text_completion(model="engram/m", prompt="once", api_base=engine.url)
    assert answer.choices[0].text == "hello world"


async def test_a_cancelled_call_closes_the_connection(engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(hold=threading.Event())
    task = asyncio.create_task(litellm.acompletion(model="engram/m", messages=HI, api_base=engine.url))
    while not engine.requests:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(engine.wait_aborted, 1)


async def test_a_cancelled_stream_closes_the_connection(engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(hold=threading.Event())
    started = asyncio.Event()

    async def read() -> None:
        async for _ in await litellm.acompletion(model="engram/m", messages=HI, api_base=engine.url, stream=True):
            started.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(started.wait(), 240)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(engine.wait_aborted, 1)


async def test_an_async_stream_left_early_closes_the_connection(engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(hold=threading.Event())
    stream = await litellm.acompletion(model="engram/m", messages=HI, api_base=engine.url, stream=True)
    async for _ in stream:
        break
    del stream
    gc.collect()
    await asyncio.sleep(0.05)
    assert await asyncio.to_thread(engine.wait_aborted, 1)


@pytest.mark.parametrize("read", [0, 1])
def test_a_stream_left_early_closes_the_connection(read: int, engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(hold=threading.Event())
    stream = litellm.completion(model="engram/m", messages=HI, api_base=engine.url, stream=True)
    for _ in range(read):
        next(stream)
    del stream
    gc.collect()
    assert engine.wait_aborted(1)
    balancer = engram_litellm.engram._core.balancer  # type: ignore[union-attr]
    end = time.monotonic() + 240
    while balancer._running:  # a thread of LiteLLM's may be the last that has it
        assert time.monotonic() < end, "an abandoned stream must not count as load"
        time.sleep(0.01)


def test_first_content_is_not_held_back(engine: FakeEngine) -> None:
    rest = threading.Event()
    engine.faults["m"] = Fault(hold=rest)
    stream = litellm.completion(model="engram/m", messages=HI, api_base=engine.url, stream=True)
    next(stream)  # while the server still holds the rest
    rest.set()
    assert list(stream)
