"""What must hold of the model's controller whatever happens: it converges, and then it is still."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_operator.kube.errors import KubeError
from engram_operator.kube.kinds import (
    DISRUPTION_BUDGETS,
    MODELS,
    NETWORK_POLICIES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFULSETS,
)
from tests.support.fake_kube import Failure
from tests.unit.operator.controllers.world import NS, World

CHILDREN = (SERVICE_ACCOUNTS, SERVICES, STATEFULSETS, DISRUPTION_BUDGETS, NETWORK_POLICIES)
FULL: dict[str, Any] = {"replicas": 2, "networkPolicy": {"enabled": True}}

specs = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(0, 3),
        "suspend": st.booleans(),
        "cache": st.sampled_from([{"type": "EmptyDir"}, {"type": "PersistentVolumeClaim", "size": "1Gi"}]),
        "snapshots": st.sampled_from([{"enabled": False}, {"hostMemory": "1Gi"}]),
        "networkPolicy": st.just({"enabled": True}),
        "monitoring": st.just({"enabled": True}),
        "scaleToZero": st.just({"idleSeconds": 60}),
        "serviceAccountName": st.just("mine"),
        "resources": st.just({"requests": {"cpu": "1500m", "memory": 1000}}),
    },
)


def children(world: World) -> dict[tuple[str, str], Any]:
    """What is there, without what the API server counts."""
    found = {}
    for kind in CHILDREN:
        for obj in world.kube.all(kind, NS):
            metadata = {k: v for k, v in obj["metadata"].items() if k in ("labels", "annotations")}
            body = {k: v for k, v in obj.items() if k not in ("metadata", "status")}
            found[kind.kind, obj["metadata"]["name"]] = (metadata, body)
    return found


@given(spec=specs, with_policy=st.booleans())
@settings(max_examples=8)
def test_the_second_look_writes_nothing(spec: dict[str, Any], with_policy: bool) -> None:
    async def run() -> None:
        world = World()
        if with_policy:
            world.policy()
        world.model(**spec)
        await world.steady()
        status = world.status()
        world.kube.forget_requests()
        for _ in range(3):
            world.later(1)
            await world.look()
        assert world.kube.writes(events=True) == []
        assert world.status() == status
        world.restart()
        await world.look()
        assert world.kube.writes(events=True) == [], "nor does the first look of a new process"

    asyncio.run(run())


async def test_idle_makes_no_writes_for_hours() -> None:
    world = World()
    world.model()
    await world.steady()
    world.kube.forget_requests()
    for _ in range(100):
        world.later(300)
        await world.look()
    assert world.kube.writes(events=True) == []
    assert [request.verb for request in world.kube.store.requests].count("list") == 0


@pytest.mark.parametrize("index", range(6))
async def test_a_deleted_child_comes_back(index: int) -> None:
    world = World()
    world.model(**FULL)
    await world.steady()
    before = children(world)
    assert len(before) == 6
    kind_name, name = sorted(before)[index]
    kind = next(kind for kind in CHILDREN if kind.kind == kind_name)
    world.kube.remove(kind, NS, name)
    await world.steady()
    assert children(world) == before


EDITS: list[tuple[Any, str, dict[str, Any]]] = [
    (STATEFULSETS, "m", {"spec": {"replicas": 5}}),
    (STATEFULSETS, "m", {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}),
    (STATEFULSETS, "m", {"spec": {"template": {"spec": {"tolerations": []}}}}),
    (STATEFULSETS, "m", {"spec": {"template": {"spec": {"containers": [{"name": "engine", "image": "other"}]}}}}),
    (STATEFULSETS, "m", {"metadata": {"annotations": {"engram.dev/applied": "x"}}}),
    (STATEFULSETS, "m", {"metadata": {"annotations": {"engram.dev/rendered": "damaged"}}}),
    (STATEFULSETS, "m", {"metadata": {"annotations": {"engram.dev/rendered": None}}}),
    (STATEFULSETS, "m", {"metadata": {"labels": {"engram.dev/model": "x"}}}),
    (SERVICES, "m", {"spec": {"selector": {"app.kubernetes.io/instance": "x"}}}),
    (SERVICES, "m", {"spec": {"selector": {"added": "x"}}}),
    (SERVICES, "m-pods", {"spec": {"ports": []}}),
    (SERVICE_ACCOUNTS, "m-engine", {"automountServiceAccountToken": True}),
    (DISRUPTION_BUDGETS, "m", {"spec": {"maxUnavailable": 0}}),
    (NETWORK_POLICIES, "m", {"spec": {"ingress": [{}]}}),
]


@pytest.mark.parametrize("edit", EDITS, ids=[f"{k.kind}-{i}" for i, (k, _, _) in enumerate(EDITS)])
async def test_an_edited_child_is_repaired(edit: tuple[Any, str, dict[str, Any]]) -> None:
    world = World()
    world.model(**FULL)
    await world.steady()
    before = children(world)
    kind, name, patch = edit
    world.kube.edit(kind, NS, name, patch)
    assert children(world) != before
    await world.steady()
    assert children(world) == before


async def test_what_others_add_beside_our_fields_stays() -> None:
    world = World()
    world.model()
    await world.steady()
    world.kube.edit(SERVICES, NS, "m", {"metadata": {"labels": {"team": "x"}, "annotations": {"lb": "y"}}})
    world.kube.forget_requests()
    await world.look()
    assert world.kube.writes() == []
    found = world.kube.find(SERVICES, NS, "m")
    assert found is not None
    assert found["metadata"]["labels"]["team"] == "x"


@given(after=st.booleans(), at=st.integers(1, 12))
@settings(max_examples=12)
def test_an_operator_that_dies_at_any_write_leaves_nothing_that_the_next_cannot_finish(after: bool, at: int) -> None:
    async def run() -> None:
        whole = World()
        whole.policy()
        whole.model(**FULL)
        await whole.steady()
        wanted = children(whole)

        world = World()
        world.policy()
        world.model(**FULL)
        failure = Dies(at, after)
        world.kube.network.failures.append(failure)
        for _ in range(12):
            try:
                await world.look()
            except (KubeError, Killed):
                world.restart()
            world.settle()
        failure.times = 0
        await world.steady()
        assert stripped(children(world)) == stripped(wanted)
        assert len(world.kube.all(SECRETS, NS)) == 1
        assert world.status()["phase"] == "Ready"

    asyncio.run(run())


class Killed(Exception):
    """The process is gone."""


class Dies(Failure):
    """The n-th write is the last one: it is done (`after`) or not, and nothing follows it."""

    def __init__(self, at: int, after: bool) -> None:
        super().__init__(503, after=after)
        self.left = at
        self.times = 1

    def matches(self, request: Any) -> bool:
        if self.times == 0 or request.verb in ("get", "list"):
            return False
        self.left -= 1
        return self.left == 0


def stripped(found: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Without the hashes and records, which hold uids and times."""
    result = {}
    for key, (metadata, spec) in found.items():
        annotations = {k: v for k, v in metadata["annotations"].items() if k not in HASHES}
        result[key] = ({**metadata, "annotations": annotations}, spec)
    return result


HASHES = ("engram.dev/applied", "engram.dev/rendered")


STEPS = ["policy", "model", "look", "look", "settle", "restart", "later", "watches lag", "watches catch up"]


@given(order=st.lists(st.sampled_from(STEPS), max_size=14))
@settings(max_examples=8)
def test_the_order_of_events_does_not_matter(order: list[str]) -> None:
    async def run() -> None:
        world = World()
        made = set()
        for step in [*order, "policy", "model", "watches catch up"]:
            if step in ("policy", "model") and step not in made:
                made.add(step)
                world.policy() if step == "policy" else world.model(**FULL)
            elif step == "look":
                await world.look()
            elif step == "settle":
                world.settle()
            elif step == "restart":
                world.restart()
            elif step == "later":
                world.later(60)
            elif step == "watches lag":
                world.kube.follow = False
            elif step == "watches catch up":
                world.kube.follow = True
                world.kube.catch_up()
        await world.steady()
        straight = World()
        straight.policy()
        straight.model(**FULL)
        await straight.steady()
        assert stripped(children(world)) == stripped(children(straight))
        assert world.status()["phase"] == "Ready"

    asyncio.run(run())


async def test_the_spec_of_the_user_is_never_written() -> None:
    world = World()
    spec = world.model(**FULL)["spec"]
    await world.steady()
    found = world.kube.find(MODELS, NS, "m")
    assert found is not None
    assert found["spec"] == spec
    assert {w[4] for w in world.kube.writes() if w[1] == "engrammodels"} <= {"", "status"}
    assert found["metadata"]["generation"] == 1


async def test_what_is_not_wanted_any_more_goes() -> None:
    world = World()
    world.model(**FULL)
    await world.steady()
    world.kube.edit(
        MODELS,
        NS,
        "m",
        {"spec": {"replicas": 1, "networkPolicy": {"enabled": False}, "serviceAccountName": "mine"}},
    )
    await world.steady()
    assert {key[0] for key in children(world)} == {"Service", "StatefulSet"}
