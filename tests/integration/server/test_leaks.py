"""After a hundred dropped connections and ten thousand odd bodies nothing is left behind: it is counted.

Counted are requests, blocks, state slots, background work, tasks of the event loop and open files. Most of the odd
bodies go to a server whose engine is scripted, which takes them ten times as fast; the rest show what they hold in a
real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import socket
import time
from pathlib import Path

import pytest

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.snapshots.types import SnapshotConfig
from tests.support import loopback, patience
from tests.support.fake_engine import FakeEngine
from tests.support.fake_snapshots import FakeSnapshots
from tests.support.serving import NAME, serving
from tests.support.tiny import make_tiny, make_tokenizer
from tests.unit.server.test_valid_requests import CHAT

DROPS = 100
BODIES = 9_500
BODIES_FOR_THE_ENGINE = 500
SETTLE_SECONDS = 120.0
ODD = (None, True, -1, 0, 1, 10**30, 1e308, "", "x", "\u0000", "../..", [], [[]], {}, {"a": {}}, [None], "9" * 400)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaks")
    path = make_tiny("granite", folder / "model")

    def load():
        snapshots = SnapshotConfig(tenant_key=b"k" * 32, **patience.SNAPSHOTS, store_uri=f"file://{folder}/store")
        return AsyncLLMEngine.from_config(EngineConfig(model=str(path), progress=False, **patience.ENGINE), snapshots)

    with serving(load) as server:
        yield server


def held(running) -> dict[str, int]:
    """What is in use right now."""
    state = running.server.state
    stats = state.loaded.engine.stats()
    tasks = running.call(lambda: len(asyncio.all_tasks()))
    return {
        "requests": stats.running + stats.waiting + stats.restoring + stats.background + stats.swapped,
        "blocks": stats.blocks_used,
        "states": stats.states_used,
        "background": len(state.background),
        "tasks": tasks,
        "files": len(list(Path("/proc/self/fd").iterdir())) if os.path.isdir("/proc/self/fd") else 0,
    }


def assert_nothing_left(running, before: dict[str, int]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = held(running)
        left = {name: (before[name], count) for name, count in now.items() if count > before[name]}
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind (before, now): {left}"
        time.sleep(0.05)


def settled(running) -> dict[str, int]:
    """A reading after one whole turn, when caches and pools are warm and idle."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert loopback.post(f"{running.url}/v1/chat/completions", json=body, timeout=240).status_code == 200
    deadline = time.monotonic() + SETTLE_SECONDS
    while (reading := held(running))["requests"] or reading["blocks"] or reading["background"]:
        assert time.monotonic() < deadline, reading
        time.sleep(0.05)
    return reading


def test_dropped_connections_leave_nothing(running):
    """A hundred, at any moment; then, where a busy machine had begun few of them, more that had certainly begun."""
    before = settled(running)
    rng = random.Random(1)

    def aborted() -> int:
        return running.server.state.loaded.engine.stats().finished.get("abort", 0)

    number = 0
    while number < DROPS or aborted() < DROPS // 2:
        assert number < 10 * DROPS, f"only {aborted()} of {number} dropped requests were aborted"
        begun = number >= DROPS
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": f"{number} " + "Tell me more. " * rng.randrange(1, 60)}],
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": begun or bool(number % 3),
            "n": 1 + number % 2,
        }
        content = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", running.server.ports[0]), timeout=240) as connection:
            whole = head.encode() + content
            connection.sendall(whole[: len(whole) if begun or number % 10 else rng.randrange(1, len(whole))])
            if begun:
                assert connection.recv(64)
            elif number % 4 == 0:
                connection.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    connection.recv(64)
            else:
                time.sleep(rng.random() * 0.03)
        number += 1
    assert_nothing_left(running, before)


def mutated(rng: random.Random) -> bytes:
    """A valid chat request with up to three fields replaced, nested or dropped; now and then no JSON at all."""
    fields = rng.choice(list(CHAT.values()))
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], **fields, "max_tokens": 1}
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice([*body, "stop", "logit_bias", "tools", "restore_from", "stream_options", "unknown"])
        kind = rng.randrange(4)
        if kind == 0:
            body.pop(name, None)
        elif kind == 1:
            body[name] = [body.get(name)] * rng.randrange(3)
        else:
            body[name] = rng.choice(ODD)
    content = json.dumps(body).encode()
    return content if rng.randrange(20) else content[: rng.randrange(len(content))] + bytes([rng.randrange(256)])


def post_odd_bodies(running, count: int, seed: int) -> None:
    """Post `count` mutated requests: each is answered, none with a 5xx, and both kinds of answer occur."""
    rng = random.Random(seed)
    statuses: dict[int, int] = {}
    # http.client takes a fifth of the time of httpx, which would be most of the test.
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", running.server.ports[0], timeout=240)) as client:
        for _ in range(count):
            content = mutated(rng)
            client.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
            answer = client.getresponse()
            told = answer.read()
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            assert answer.status < 500, (content, told)
            if answer.status >= 400:
                assert json.loads(told)["error"]["message"], content
    assert statuses[200] > count // 100, statuses  # the valid ones among them really ran
    assert statuses[400] > count // 2, statuses


def test_odd_bodies_leave_nothing_in_the_engine(running):
    before = settled(running)
    post_odd_bodies(running, BODIES_FOR_THE_ENGINE, 2)
    assert_nothing_left(running, before)


def test_odd_bodies_leave_nothing_in_the_server():
    engine = FakeEngine(make_tokenizer(), snapshots=FakeSnapshots())
    with serving(lambda: engine) as running:
        before = settled(running)
        post_odd_bodies(running, BODIES, 3)
        assert_nothing_left(running, before)
