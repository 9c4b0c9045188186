"""Connections: reused when whole, never when cut, dropped when the server closed them."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator

import httpx
import pytest

from engram_litellm import pool
from engram_litellm.pool import PooledTransport
from tests.support.fake_openai import FakeEngine, Fault
from tests.support.ports import free_port

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=PooledTransport(ssl.create_default_context()), timeout=240) as client:
        yield client


async def ask(client: httpx.AsyncClient, engine: FakeEngine, **options: object) -> httpx.Response:
    return await client.post(f"{engine.url}/v1/chat/completions", json=BODY, **options)  # type: ignore[arg-type]


async def test_one_after_another_share_one_connection(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for _ in range(5):
        assert (await ask(client, engine)).status_code == 200
    assert engine.connections == 1


async def ask_at_once(client: httpx.AsyncClient, engine: FakeEngine, calls: int) -> None:
    """None is answered before all have arrived."""
    engine.faults["m"] = Fault(hold=threading.Event())
    before = len(engine.chats())
    asked = asyncio.gather(*[ask(client, engine) for _ in range(calls)])
    assert await asyncio.to_thread(engine.wait_chats, before + calls)
    engine.faults["m"].hold.set()
    await asked


async def test_at_once_use_one_each_and_are_kept(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for _ in range(3):
        await ask_at_once(client, engine, 20)
    assert engine.connections == 20


async def test_a_limit_of_idle_ones(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_IDLE", 2)
    await ask_at_once(client, engine, 5)
    await ask_at_once(client, engine, 5)
    assert engine.connections == 5 + 3


async def test_a_stream_left_early_is_not_reused(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(pace=0.2)
    body = {**BODY, "stream": True}
    async with client.stream("POST", f"{engine.url}/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            break
    engine.faults.clear()
    assert (await ask(client, engine)).status_code == 200
    assert engine.connections == 2


async def test_what_the_server_closed_is_not_tried(client: httpx.AsyncClient) -> None:
    port = free_port()
    engine = FakeEngine(port).start()
    await ask(client, engine)
    engine.stop()
    with FakeEngine(port) as again:
        assert (await ask(client, again)).status_code == 200


async def test_failures_are_httpxs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    with pytest.raises(httpx.ConnectError):
        await client.get("http://127.0.0.1:9")
    engine.faults["m"] = Fault(hold=threading.Event())
    with pytest.raises(httpx.ReadTimeout):
        await ask(client, engine, timeout=httpx.Timeout(60.0, read=0.2))
    engine.faults["m"] = Fault(drop=True)
    with pytest.raises(httpx.RemoteProtocolError):
        await ask(client, engine)
    engine.faults["m"] = Fault(cut_after=2)
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(f"{engine.url}/v1/chat/completions", json={**BODY, "stream": True})
