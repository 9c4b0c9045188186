"""Several replicas: discovery by file, affinity, failover, restarts; two workers; one conversation throughout."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litellm
import pytest

import engram_litellm
from engram_litellm.provider import EngramLLM
from tests.integration.provider.styles import HI, STYLES, ask, failure
from tests.support.fake_openai import FakeEngine, Fault
from tests.support.ports import free_port
from tests.support.stopwatch import Stopwatch


@pytest.fixture
def replicas() -> Iterator[list[FakeEngine]]:
    servers = [FakeEngine().start() for _ in range(3)]
    yield servers
    for server in servers:
        server.stop()


def publish(urls: list[str], model: str = "m") -> None:
    """What `engram up` writes."""
    path = Path(os.environ["XDG_STATE_HOME"]) / "engram" / "endpoints.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    endpoints = [{"name": f"{model}-{i}", "url": url, "admin_url": "http://127.0.0.1:1"} for i, url in enumerate(urls)]
    data = {"version": 1, "models": {model: {"namespace": "default", "endpoints": endpoints, "pid": os.getpid()}}}
    path.with_suffix(".tmp").write_text(json.dumps(data))
    os.replace(path.with_suffix(".tmp"), path)


def served(replicas: list[FakeEngine]) -> list[int]:
    return [len(server.chats()) for server in replicas]


@pytest.mark.parametrize("style", STYLES)
def test_the_local_file_needs_no_settings(style: str, engine: FakeEngine) -> None:
    publish([engine.url])
    out = ask(style)
    assert out.text == "hello world"
    assert out.engram["replica"] == "m-0"
    assert ask(style, model="engram/default/m").text == "hello world"
    assert engine.chats()[-1]["model"] == "m"


@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_stays_on_its_replica(style: str, replicas: list[FakeEngine]) -> None:
    publish([server.url for server in replicas])
    for number in range(4):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"chat {number}"}]
        homes = set()
        for _ in range(4):
            out = ask(style, messages)
            homes.add(out.engram["replica"])
            messages += [{"role": "assistant", "content": out.text}, *HI]
        assert len(homes) == 1
        assert out.engram["tokens_saved"] == 60


def test_conversations_spread(replicas: list[FakeEngine]) -> None:
    publish([server.url for server in replicas])
    for number in range(60):
        ask("sync", [{"role": "user", "content": f"chat {number}"}])
    assert all(count >= 8 for count in served(replicas)), served(replicas)


def test_workers_that_share_nothing_agree(replicas: list[FakeEngine]) -> None:
    publish([server.url for server in replicas])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "one chat, many workers"}]
    homes = []
    for _ in range(4):
        worker = EngramLLM()
        answer = worker.completion(model="m", messages=messages, optional_params={})
        homes.append(answer.choices[0].message.provider_specific_fields["engram"]["replica"])
        messages += [{"role": "assistant", "content": "hello world"}, *HI]
    assert len(set(homes)) == 1


@pytest.mark.parametrize("style", STYLES)
def test_a_killed_replica_is_replaced_within_the_call(style: str, replicas: list[FakeEngine]) -> None:
    publish([server.url for server in replicas])
    first = ask(style)
    home = int(first.engram["replica"].removeprefix("m-"))
    replicas[home].stop()
    with Stopwatch() as watch:
        second = ask(style, [*HI, {"role": "assistant", "content": first.text}, *HI], max_retries=0)
        assert second.text == "hello world"
        assert second.engram["replica"] != first.engram["replica"]
    assert watch.seconds < 5
    sent = replicas[int(second.engram["replica"].removeprefix("m-"))].chats()[-1]
    assert sent["conversation_id"] == first.engram["conversation_id"]


@pytest.mark.parametrize("style", STYLES)
def test_a_replica_that_dies_at_work_is_replaced(style: str, replicas: list[FakeEngine]) -> None:
    """Killed after it took the request and before the first byte."""
    publish([server.url for server in replicas])
    for server in replicas:
        server.faults["m"] = Fault(delay=3600)

    def kill() -> None:
        while not any(served(replicas)):
            time.sleep(0.01)
        home = replicas[served(replicas).index(1)]
        for server in replicas:
            if server is not home:
                server.faults.clear()
        home.stop()

    killer = threading.Thread(target=kill)
    killer.start()
    assert ask(style).text == "hello world"
    killer.join()
    assert sum(served(replicas)) == 2


@pytest.mark.parametrize("style", STYLES)
def test_a_full_replica_spills_to_the_next(style: str, replicas: list[FakeEngine]) -> None:
    publish([server.url for server in replicas])
    home = int(ask(style).engram["replica"].removeprefix("m-"))
    replicas[home].faults["m"] = Fault(status=429, headers={"retry-after": "30"})
    with Stopwatch() as watch:
        out = ask(style)
        assert out.engram["replica"] != f"m-{home}"
    assert watch.seconds < 5


@pytest.mark.parametrize("style", STYLES)
def test_a_draining_replica_costs_no_retry(style: str, replicas: list[FakeEngine]) -> None:
    publish([server.url for server in replicas])
    home = int(ask(style).engram["replica"].removeprefix("m-"))
    assert engram_litellm.engram._core is not None
    engram_litellm.engram._core.balancer._clock = lambda: 0.0  # its rest is not over before it is looked at
    replicas[home].faults["m"] = Fault(status=503)
    assert ask(style, max_retries=0).engram["replica"] != f"m-{home}"
    count = len(replicas[home].chats())
    ask(style, max_retries=0)
    assert len(replicas[home].chats()) == count, "it rests for a while"


@pytest.mark.parametrize("style", STYLES)
def test_a_call_waits_for_the_only_replica_to_come_back(style: str) -> None:
    port = free_port()
    publish([f"http://127.0.0.1:{port}"])
    engine = FakeEngine(port)
    starter = threading.Timer(1.5, engine.start)
    starter.start()
    try:
        assert ask(style).text == "hello world"
    finally:
        starter.join()
        engine.stop()


@pytest.mark.parametrize("style", STYLES)
def test_who_wants_no_retries_does_not_wait(style: str) -> None:
    publish([f"http://127.0.0.1:{free_port()}"])
    with Stopwatch() as watch:
        error = failure(lambda: ask(style, max_retries=0))
        assert type(error) is litellm.APIConnectionError
    assert watch.seconds < 3


def test_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_WAIT_SECONDS", "1")
    publish([f"http://127.0.0.1:{free_port()}"])
    with Stopwatch() as watch:
        error = failure(lambda: ask("sync"))
        assert type(error) is litellm.APIConnectionError
    assert watch.whole >= 1
    assert watch.seconds < 10


def test_a_new_address_is_seen_while_waiting(engine: FakeEngine) -> None:
    publish([f"http://127.0.0.1:{free_port()}"])
    timer = threading.Timer(0.7, publish, [[engine.url]])
    timer.start()
    assert ask("sync").text == "hello world"
    timer.join()


async def test_load_is_bounded(replicas: list[FakeEngine]) -> None:
    """One hot conversation may not fill one replica while the others idle."""
    publish([server.url for server in replicas])
    all_arrived = threading.Event()
    for server in replicas:
        server.faults["m"] = Fault(hold=all_arrived)
    calls = asyncio.gather(*[litellm.acompletion(model="engram/m", messages=HI) for _ in range(24)])
    while sum(served(replicas)) < 24:
        await asyncio.sleep(0.01)
        if calls.done():
            break
    all_arrived.set()
    answers = await calls
    counts = Counter(answer.choices[0].message.provider_specific_fields["engram"]["replica"] for answer in answers)
    assert max(counts.values()) <= 12, "1.5 times the mean"


def test_a_list_of_addresses_balances_too(replicas: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_ENDPOINTS", ",".join(server.url for server in replicas))
    replicas[0].stop()
    replicas[1].stop()
    for number in range(5):
        assert ask("sync", [{"role": "user", "content": str(number)}], max_retries=0).text == "hello world"
    assert engram_litellm.engram._core is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_has_connections_of_its_own(engine: FakeEngine) -> None:
    worker = EngramLLM()

    def turn() -> str:
        answer = worker.completion(model="m", messages=HI, api_base=engine.url, optional_params={})
        return str(answer.choices[0].message.content)

    assert turn() == "hello world"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, turn().encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"hello world"
    assert turn() == "hello world"
    os.close(reader)
    os.close(writer)
