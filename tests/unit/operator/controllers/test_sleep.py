"""Scale to zero: the request that wakes a model is held by the activator, and none goes the old way."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engram_operator.builders import naming
from engram_operator.controllers import sleep
from engram_operator.controllers.sleep import Seen, Stage, stage
from engram_operator.kube.kinds import DEPLOYMENTS, MODELS, PODS, SERVICE_ACCOUNTS, SERVICES
from tests.unit.operator.controllers.world import NS, World, loading, running
from tests.unit.operator.documents import model


def routed(world: World, name: str = "m") -> bool:
    found = world.kube.find(SERVICES, NS, name)
    assert found is not None
    return bool(found["spec"]["selector"] == naming.activator_selector())


async def asleep(world: World) -> None:
    """A model that has gone to sleep, by the whole way."""
    world.model(replicas=2, scaleToZero={"idleSeconds": 60})
    await world.steady()
    assert world.kube.find(DEPLOYMENTS, NS, "engram-activator") is not None
    world.engines.idle = 100.0
    world.later(100)
    await world.steady()
    world.later(4)
    await world.steady()
    assert world.pods() == []


async def test_to_sleep_and_back() -> None:
    world = World()
    world.model(replicas=2, scaleToZero={"idleSeconds": 60})
    await world.steady()
    assert not routed(world)
    world.engines.idle = 30.0
    world.later(30)
    again = await world.look()
    assert again is not None
    assert again <= 30
    assert not routed(world)

    world.engines.idle = 61.0
    world.later(31)
    await world.look()
    assert routed(world), "first the way is changed"
    assert world.stateful_set()["spec"]["replicas"] == 2, "and the pods still run"
    world.later(3)
    world.engines.idle = 64.0
    await world.look()
    assert world.stateful_set()["spec"]["replicas"] == 0
    world.settle()
    assert await world.look() is None
    assert world.status()["phase"] == "Idle"
    assert world.condition("Ready")[:2] == ("True", "Idle")
    assert world.status()["desiredReplicas"] == 0
    assert ("Normal", "Asleep", "no request for 60 s: no pods now") in world.kube.events()

    # nothing wakes it but a request
    world.restart()
    for _ in range(3):
        world.later(300)
        await world.look()
    assert world.stateful_set()["spec"]["replicas"] == 0

    world.engines.held = {"m": 1}
    again = await world.activators.reconcile(NS, "engram-activator")
    assert again == 1.0
    assert (MODELS, NS, "m") in world.queued
    await world.look()
    assert world.stateful_set()["spec"]["replicas"] == 2
    assert routed(world), "the activator goes on holding until a pod is ready"
    world.settle(ready=False)
    assert await world.look() == 1.0
    assert routed(world)
    world.engines.held, world.engines.idle = {}, 0.0
    world.kube.set_status(PODS, NS, "m-1", running())
    await world.look()
    assert not routed(world)
    world.kube.set_status(PODS, NS, "m-0", running())
    await world.steady()
    assert world.status()["phase"] == "Ready"


async def test_a_request_on_the_old_way_keeps_it_awake() -> None:
    world = World()
    world.model(scaleToZero={"idleSeconds": 60})
    await world.steady()
    world.engines.idle = 61.0
    world.later(61)
    await world.look()
    assert routed(world)
    world.engines.idle = 1.0
    world.later(3)
    await world.look()
    assert not routed(world)
    assert world.stateful_set()["spec"]["replicas"] == 1


async def test_looks_in_between_change_nothing_until_every_node_has_heard() -> None:
    world = World()
    world.model(scaleToZero={"idleSeconds": 60})
    await world.steady()
    world.engines.idle = 61.0
    world.later(61)
    await world.models.reconcile(NS, "m")
    assert routed(world)
    before = world.kube.find(SERVICES, NS, "m")
    for _ in range(3):  # its own write comes back as an event, before the activator was asked at all
        await world.models.reconcile(NS, "m")
    assert world.kube.find(SERVICES, NS, "m") == before
    for _ in range(2):
        world.later(1)
        await world.look()
        assert world.stateful_set()["spec"]["replicas"] == 1
    assert world.kube.find(SERVICES, NS, "m") == before
    world.restart()
    world.later(1)
    await world.look()
    assert world.stateful_set()["spec"]["replicas"] == 1, "a new process asks the activator first"
    await world.look()
    assert world.stateful_set()["spec"]["replicas"] == 0


async def test_what_an_activator_said_long_ago_counts_for_nothing() -> None:
    world = World()
    await asleep(world)
    world.engines.held = {"m": 2}
    await world.activators.reconcile(NS, "engram-activator")
    world.engines.idle = 0.0
    await world.steady()
    assert not routed(world)
    world.engines.held = {}
    await world.look()
    world.engines.idle = 100.0
    world.later(100)
    await world.look()
    await world.models.reconcile(NS, "m")
    assert routed(world)


async def test_a_model_that_works_or_does_not_answer_never_sleeps() -> None:
    world = World()
    world.model(scaleToZero={"idleSeconds": 60})
    await world.steady()
    world.engines.idle = 1000.0
    world.engines.running = 1
    world.later(1000)
    await world.look()
    assert not routed(world)
    world.engines.running, world.engines.silent = 0, True
    world.later(1000)
    await world.look()
    assert not routed(world)


async def test_without_a_ready_activator_nobody_sleeps() -> None:
    world = World()
    world.model(scaleToZero={"idleSeconds": 60})
    await world.steady()
    world.kube.set_status(PODS, NS, "engram-activator-abc", loading())
    world.engines.idle = 1000.0
    world.later(1000)
    again = await world.look()
    assert not routed(world)
    assert again is not None


async def test_turned_off_while_asleep_it_wakes() -> None:
    world = World()
    await asleep(world)
    world.engines.idle = 0.0
    world.kube.edit(MODELS, NS, "m", {"spec": {"scaleToZero": None}})
    await world.steady()
    assert world.status()["phase"] == "Ready"
    assert not routed(world)
    assert world.kube.all(DEPLOYMENTS) == [], "no model needs it any more"
    assert [o for o in world.kube.all(SERVICE_ACCOUNTS) if o["metadata"]["name"] == "engram-activator"] == []


async def test_suspended_while_asleep_it_is_suspended() -> None:
    world = World()
    await asleep(world)
    world.kube.edit(MODELS, NS, "m", {"spec": {"suspend": True}})
    await world.steady()
    assert world.status()["phase"] == "Suspended"
    assert not routed(world)


async def test_deleted_while_asleep_the_activator_goes_with_it() -> None:
    world = World()
    await asleep(world)
    world.kube.remove(MODELS, NS, "m")
    await world.look()
    await world.look()
    assert world.kube.find(MODELS, NS, "m") is None
    assert world.kube.all(DEPLOYMENTS) == []


async def test_the_activator_is_repaired_and_shared() -> None:
    world = World()
    await asleep(world)
    world.model("other", scaleToZero={"idleSeconds": 60})
    world.engines.idle = 0.0
    await world.steady("other")
    (deployment,) = world.kube.all(DEPLOYMENTS)
    assert {owner["name"] for owner in deployment["metadata"]["ownerReferences"]} == {"m", "other"}
    world.kube.edit(DEPLOYMENTS, NS, "engram-activator", {"spec": {"replicas": 0}})
    await world.activators.reconcile(NS, "engram-activator")
    assert world.kube.all(DEPLOYMENTS)[0]["spec"]["replicas"] == 1
    world.kube.forget_requests()
    for _ in range(5):
        assert await world.activators.reconcile(NS, "engram-activator") == 1.0
    assert world.kube.writes(events=True) == []


async def test_an_activator_that_does_not_answer_wakes_nobody_and_is_asked_again() -> None:
    world = World()
    await asleep(world)
    world.engines.silent = True
    assert await world.activators.reconcile(NS, "engram-activator") == 1.0
    await world.look()
    assert world.stateful_set()["spec"]["replicas"] == 0


async def test_other_deployments_are_none_of_its_business() -> None:
    world = World()
    assert await world.activators.reconcile(NS, "shop") is None
    assert world.kube.store.requests == []


POINTED = {
    "metadata": {"annotations": {sleep.ROUTED: "1000"}},
    "spec": {"selector": naming.activator_selector()},
}
facts = st.builds(
    Seen,
    stateful_set=st.sampled_from([None, {"metadata": {}}, {"metadata": {"annotations": {sleep.ASLEEP: "true"}}}]),
    service=st.sampled_from([None, {"spec": {"selector": {"x": "y"}}}, POINTED]),
    ready=st.integers(0, 2),
    idle=st.one_of(st.none(), st.floats(0, 200)),
    held=st.one_of(st.none(), st.integers(0, 3)),
    activator_ready=st.booleans(),
    now=st.floats(1000, 2000),
)
specs = st.sampled_from(
    [{}, {"scaleToZero": {"idleSeconds": 60}}, {"scaleToZero": {}, "suspend": True}, {"scaleToZero": {}, "replicas": 0}]
)


@given(seen=facts, spec=specs)
def test_pods_go_only_after_the_way_was_changed_and_nobody_waits(seen: Seen, spec: dict[str, Any]) -> None:
    found = stage(model(**spec), seen)
    was_asleep, was_routed = sleep.is_asleep(seen.stateful_set), sleep.is_routed(seen.service)
    if found is Stage.ASLEEP and not was_asleep:
        assert was_routed
        assert seen.held == 0
        assert seen.now - 1000 >= 3
        assert seen.idle is not None
        assert seen.idle >= 60
    if found is Stage.FALLING:
        assert seen.activator_ready
        assert not was_asleep
    if seen.held and was_asleep and sleep.may_sleep(model(**spec)):
        assert found is Stage.WAKING
    if not sleep.may_sleep(model(**spec)):
        assert found is Stage.AWAKE
