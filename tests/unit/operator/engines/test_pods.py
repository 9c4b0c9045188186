"""Which pods are asked, and that a conversation's home is the one that clients choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_litellm import routing
from engram_litellm.discovery.endpoints import Endpoint
from engram_operator.engines import EnginePod, engine_pods, ranked


def pod(name="m-0", *, ip="10.0.0.1", phase="Running", ready=True, deleting=False):
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}"}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": metadata, "status": {"phase": phase, "podIP": ip, "conditions": conditions}}


def test_ready_pods_come_first_and_those_that_go_are_left_out():
    pods = [
        pod("m-0", ready=False),
        pod("m-1", deleting=True),
        pod("m-2", phase="Pending", ip=""),
        pod("m-3"),
        pod("m-4", phase="Failed"),
    ]
    assert [(p.name, p.ready) for p in engine_pods(pods)] == [("m-3", True), ("m-0", False)]


@pytest.mark.parametrize("ip", [None, "", "example.org", "10.0.0.1/../", "10.0.0.1:80", "999.1.1.1"])
def test_what_is_no_address_is_never_called(ip):
    assert engine_pods([pod(ip=ip)]) == []


def test_both_kinds_of_address_are_taken():
    assert [p.ip for p in engine_pods([pod("a", ip="10.0.0.1"), pod("b", ip="fd00::1")])] == ["10.0.0.1", "fd00::1"]


@given(st.text(min_size=1, max_size=50), st.integers(1, 6))
def test_the_home_is_the_one_that_clients_choose(key, replicas):
    names = [f"m-{ordinal}" for ordinal in range(replicas)]
    ours = ranked(key, [EnginePod(name, "ns", name, "10.0.0.1", True) for name in names])
    theirs = routing.ranked(key, [Endpoint(name, f"http://{name}:8000") for name in names])
    assert [p.name for p in ours] == [endpoint.name for endpoint in theirs]
