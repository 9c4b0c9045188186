"""The tracker finds the longest known history, forgets by age and size, and never moves a head back."""

from __future__ import annotations

import threading

import pytest

from engram_litellm.errors import MissingExtra
from engram_litellm.redis_tracker import FAILURES_TO_OPEN, OPEN_SECONDS, Breaker, RedisTracker, connect
from engram_litellm.tracker import LocalTracker, Node

DIGESTS = [bytes([i]) * 32 for i in range(8)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_longest_boundary_wins() -> None:
    tracker = LocalTracker()
    tracker.record("k", DIGESTS[1], Node("c", home="a", turn=1))
    tracker.record("k", DIGESTS[4], Node("c", home="b", turn=2))
    assert tracker.find("k", DIGESTS[:7]) == (4, Node("c", home="b", turn=2))
    assert tracker.find("k", DIGESTS[:4]) == (1, Node("c", home="a", turn=1))
    assert tracker.find("k", DIGESTS[5:]) is None


def test_owners_see_only_their_own() -> None:
    tracker = LocalTracker()
    tracker.record("k", DIGESTS[0], Node("c"))
    assert tracker.find("other", DIGESTS) is None
    assert tracker.head("other", "c") is None


def test_a_late_turn_does_not_move_the_head_back() -> None:
    tracker = LocalTracker()
    assert tracker.record("k", DIGESTS[3], Node("c", home="b", turn=5))
    assert not tracker.record("k", DIGESTS[2], Node("c", home="a", turn=4))
    assert tracker.head("k", "c") == Node("c", home="b", turn=5)
    assert tracker.find("k", DIGESTS[:3]) == (2, Node("c", home="a", turn=4))


def test_the_least_recently_used_is_forgotten() -> None:
    tracker = LocalTracker(capacity=2)
    for index in range(2):
        tracker.record("k", DIGESTS[index], Node(f"c{index}"))
    assert tracker.find("k", DIGESTS[:1]) is not None
    tracker.record("k", DIGESTS[2], Node("c2"))
    assert tracker.find("k", DIGESTS[1:2]) is None
    assert tracker.find("k", DIGESTS[:1]) is not None
    assert len(tracker) == 2


def test_entries_expire_unless_they_are_used() -> None:
    clock = Clock()
    tracker = LocalTracker(ttl=10, clock=clock)
    tracker.record("k", DIGESTS[0], Node("c"))
    for _ in range(3):
        clock.now += 8
        assert tracker.find("k", DIGESTS[:1]) is not None
    clock.now += 11
    assert tracker.find("k", DIGESTS[:1]) is None


def test_threads_may_share_it() -> None:
    tracker = LocalTracker(capacity=50)

    def work(name: str) -> None:
        for turn in range(200):
            tracker.record("k", f"{name}{turn}".encode(), Node(name, turn=turn))
            tracker.find("k", DIGESTS)

    threads = [threading.Thread(target=work, args=(f"c{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tracker) == 50
    heads = [tracker.head("k", f"c{i}") for i in range(4)]
    assert all(head is not None and head.turn == 199 for head in heads)


class DeadRedis:
    """A Redis that is away; counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def register_script(self, _: str) -> object:
        return self._fail

    def mget(self, *_: object) -> object:
        return self._fail()

    def hget(self, *_: object) -> object:
        return self._fail()

    def _fail(self, **_: object) -> object:
        self.calls += 1
        raise OSError("connection refused")


def test_without_redis_the_process_remembers_by_itself() -> None:
    redis = DeadRedis()
    tracker = RedisTracker("redis://nowhere", client=redis)
    assert tracker.record("k", DIGESTS[2], Node("c", "s", "a", 1))
    assert tracker.find("k", DIGESTS[:5]) == (2, Node("c", "s", "a", 1))
    assert tracker.head("k", "c") == Node("c", "s", "a", 1)


def test_the_breaker_stops_asking_and_tries_again() -> None:
    redis, clock = DeadRedis(), Clock()
    tracker = RedisTracker("redis://nowhere", client=redis, clock=clock)
    for _ in range(20):
        tracker.find("k", DIGESTS)
    assert redis.calls == FAILURES_TO_OPEN
    clock.now += OPEN_SECONDS + 1
    for _ in range(20):
        tracker.find("k", DIGESTS)
    assert redis.calls == FAILURES_TO_OPEN + 1


def test_one_success_closes_the_breaker() -> None:
    breaker = Breaker(Clock())
    for _ in range(FAILURES_TO_OPEN - 1):
        assert breaker.call(lambda: 1 / 0) is None
    assert breaker.call(lambda: "ok") == "ok"
    for _ in range(FAILURES_TO_OPEN - 1):
        assert breaker.call(lambda: 1 / 0) is None
    assert breaker.call(lambda: "ok") == "ok"


def test_missing_redis_names_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(MissingExtra, match="pip install redis"):
        connect("redis://localhost")
