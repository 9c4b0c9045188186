"""Replica choice: home first, bounded rendezvous, ejection."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_litellm.discovery.endpoints import Endpoint
from engram_litellm.routing import FIRST_EJECTION, LAST_EJECTION, Balancer, choose, ranked

PODS = [Endpoint(f"m-{i}", f"http://10.0.0.{i}:8000") for i in range(8)]


def idle(_: Endpoint) -> int:
    return 0


def test_keys_spread_evenly() -> None:
    counts = Counter(choose(f"c{i}", PODS, None, idle).name for i in range(8000))
    assert set(counts) == {pod.name for pod in PODS}
    assert all(850 < count < 1150 for count in counts.values()), counts


def test_the_choice_does_not_depend_on_the_order_or_the_address() -> None:
    moved = [Endpoint(pod.name, f"http://10.9.9.{i}:8000") for i, pod in enumerate(PODS)]
    for i in range(100):
        names = {choose(f"c{i}", pods, None, idle).name for pods in (PODS, PODS[::-1], moved)}
        assert len(names) == 1


def test_a_lost_replica_moves_only_its_own_keys() -> None:
    before = {f"c{i}": choose(f"c{i}", PODS, None, idle).name for i in range(2000)}
    after = {key: choose(key, PODS[1:], None, idle).name for key in before}
    assert all(after[key] == name for key, name in before.items() if name != "m-0")
    assert len({after[key] for key, name in before.items() if name == "m-0"}) == 7


def test_home_wins_while_it_is_not_full() -> None:
    home = ranked("c", PODS)[-1].name
    assert choose("c", PODS, home, idle).name == home
    loads = {pod.name: 9 if pod.name == home else 1 for pod in PODS}
    spilled = choose("c", PODS, home, lambda pod: loads[pod.name])
    assert spilled.name == ranked("c", PODS)[0].name


def test_a_gone_home_falls_to_rendezvous() -> None:
    assert choose("c", PODS, "m-99", idle) == choose("c", PODS, None, idle)


def test_below_the_floor_nobody_is_full() -> None:
    home = PODS[0].name
    assert choose("c", PODS, home, lambda pod: 3 if pod.name == home else 0).name == home
    assert choose("c", PODS, home, lambda pod: 4 if pod.name == home else 0).name != home


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.text(max_size=5), st.integers(0, 8))
def test_a_chosen_replica_is_below_the_bound(loads: list[int], key: str, home: int) -> None:
    pods = PODS[: len(loads)]
    chosen = choose(key, pods, f"m-{home}", lambda pod: loads[pods.index(pod)])
    load = loads[pods.index(chosen)]
    assert load < max(4, -(-1.5 * (sum(loads) + 1) // len(loads))) or load == min(loads)


def test_no_replica_is_no_choice() -> None:
    assert choose("c", [], None, idle) is None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_failed_replica_rests_longer_each_time() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    first, second = PODS[:2]
    for length in (FIRST_EJECTION, 2 * FIRST_EJECTION, 4 * FIRST_EJECTION):
        balancer.failed(first)
        chosen = balancer.acquire("k", PODS[:2], first.name)
        assert chosen == second
        balancer.release(chosen)
        clock.now += length
        again = balancer.acquire("k", PODS[:2], first.name)
        assert again == first
        balancer.release(again)
    for _ in range(10):
        balancer.failed(first)
    clock.now += LAST_EJECTION
    assert balancer.acquire("k", PODS[:1], None) == first
    balancer.succeeded(first)
    balancer.failed(first)
    clock.now += FIRST_EJECTION
    assert balancer.acquire("k", PODS[:1], None) == first


def test_when_all_are_ejected_one_is_taken_all_the_same() -> None:
    balancer = Balancer(Clock())
    balancer.failed(PODS[0])
    assert balancer.acquire("k", PODS[:1], None) is None
    assert balancer.acquire_any("k", PODS[:1], None) == PODS[0]


@pytest.mark.parametrize("name", ["acquire", "acquire_any"])
def test_draining_replicas_take_no_new_turn(name: str) -> None:
    balancer = Balancer(Clock())
    draining = Endpoint("m-0", "http://a", draining=True)
    assert getattr(balancer, name)("k", [draining], "m-0") is None
    assert getattr(balancer, name)("k", [draining, PODS[1]], "m-0") == PODS[1]


def test_running_requests_are_counted() -> None:
    balancer = Balancer(Clock())
    taken = [balancer.acquire("k", PODS[:2], None) for _ in range(8)]
    assert Counter(pod.name for pod in taken if pod).most_common()[0][1] <= 6
    assert sum(balancer.running(pod) for pod in PODS[:2]) == 8
    for pod in taken:
        balancer.release(pod)
    assert sum(balancer.running(pod) for pod in PODS[:2]) == 0
