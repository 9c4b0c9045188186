"""Upgrades, drains, lost nodes, stuck pods: what becomes of pods, and who is told."""

from __future__ import annotations

from typing import Any

import pytest

from engram_operator.kube.kinds import MODELS, PODS, SERVICES, STATEFULSETS
from engram_operator.settings import RollPolicy
from tests.unit.operator.controllers.world import NS, World, loading, running


def images(world: World) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in world.pods()}


async def test_an_operator_upgrade_rolls_nothing_until_the_spec_changes() -> None:
    world = World()
    world.model()
    await world.steady()
    uids = {pod["metadata"]["uid"] for pod in world.pods()}
    world.restart(image="engine:2")
    await world.steady()
    assert {pod["metadata"]["uid"] for pod in world.pods()} == uids
    status, reason, message = world.condition("UpToDate")
    assert (status, reason) == ("False", "OperatorUpgradePending")
    assert "engine image engine:1 -> engine:2" in message
    assert "kubectl annotate engrammodel m engram.dev/roll=" in message
    assert world.condition("Ready")[0] == "True"
    assert world.status()["image"] == "engine:1"
    world.kube.forget_requests()
    await world.look()
    assert world.kube.writes(events=True) == []
    # what reaches no pod takes nothing along
    world.kube.edit(MODELS, NS, "m", {"spec": {"replicas": 2}})
    await world.steady()
    assert images(world) == {"engine:1"}
    assert len(world.pods()) == 2
    world.kube.edit(MODELS, NS, "m", {"spec": {"engine": {"maxConcurrency": 8}}})
    await world.steady()
    assert images(world) == {"engine:2"}
    assert world.condition("UpToDate")[0] == "True"


@pytest.mark.parametrize("value", ["now", "1"])
async def test_the_roll_annotation_takes_an_upgrade_in(value: str) -> None:
    world = World()
    world.model()
    await world.steady()
    world.restart(image="engine:2")
    await world.steady()
    world.kube.edit(MODELS, NS, "m", {"metadata": {"annotations": {"engram.dev/roll": value}}})
    await world.steady()
    assert images(world) == {"engine:2"}
    assert ("Normal", "RollingOut", "the pods are replaced by the changed version") in world.kube.events()
    # the same value does nothing for the next upgrade
    world.restart(image="engine:3")
    await world.steady()
    assert images(world) == {"engine:2"}


async def test_automatic_rolls_at_once() -> None:
    world = World()
    world.model()
    await world.steady()
    world.restart(image="engine:2", roll=RollPolicy.AUTOMATIC)
    await world.steady()
    assert images(world) == {"engine:2"}
    assert world.condition("UpToDate")[0] == "True"


async def test_a_model_without_pods_is_upgraded_at_once() -> None:
    world = World()
    world.model(suspend=True)
    await world.steady()
    world.restart(image="engine:2")
    await world.steady()
    assert world.condition("UpToDate")[0] == "True"
    world.kube.edit(MODELS, NS, "m", {"spec": {"suspend": False}})
    await world.steady()
    assert images(world) == {"engine:2"}


async def test_an_edit_of_the_pods_is_repaired_while_an_upgrade_waits() -> None:
    world = World()
    world.model()
    await world.steady()
    world.restart(image="engine:2")
    await world.steady()
    before = world.stateful_set()["spec"]
    world.kube.edit(STATEFULSETS, NS, "m", {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}})
    await world.steady()
    assert world.stateful_set()["spec"] == before
    assert images(world) == {"engine:1"}


async def test_a_default_that_a_newer_definition_brings_is_no_change_by_a_user() -> None:
    world = World()
    world.model()
    await world.steady()
    # as a definition without these fields would have stored it
    found = world.kube.find(MODELS, NS, "m")
    assert found is not None
    for field in ("updateStrategy", "monitoring", "accelerator", "cache"):
        del found["spec"][field]
    world.kube.cache.put(MODELS, found)
    world.restart(image="engine:2")
    await world.look()
    assert world.condition("UpToDate")[1] == "OperatorUpgradePending"


async def test_a_changed_policy_reaches_the_pods() -> None:
    world = World()
    world.model()
    await world.steady()
    world.policy(uri="pvc://memory")
    await world.steady()
    args = world.pods()[0]["spec"]["containers"][0]
    assert args["image"] == "engine:1"
    template = world.stateful_set()["spec"]["template"]["spec"]["containers"][0]
    assert "file:///var/lib/engram/store" in template["args"]
    assert world.condition("SnapshotsReady")[:2] == ("True", "StoreReachable")


async def test_suspend_and_back() -> None:
    world = World()
    world.model(replicas=2)
    await world.steady()
    world.kube.edit(MODELS, NS, "m", {"spec": {"suspend": True}})
    await world.steady()
    assert world.pods() == []
    assert world.status()["phase"] == "Suspended"
    assert world.condition("Ready")[:2] == ("False", "Suspended")
    assert world.condition("ModelCached")[0] == "True"
    world.kube.edit(MODELS, NS, "m", {"spec": {"suspend": False}})
    await world.steady()
    assert world.status()["phase"] == "Ready"
    assert world.status()["readyReplicas"] == 2


async def test_deletion_waits_for_the_pods() -> None:
    world = World()
    world.model(replicas=2)
    await world.steady()
    world.kube.remove(MODELS, NS, "m")
    again = await world.look()
    assert again is not None
    assert world.stateful_set()["spec"]["replicas"] == 0
    assert world.status()["phase"] == "Draining"
    assert world.kube.find(SERVICES, NS, "m") is not None
    world.settle()
    assert await world.look() is None
    assert world.kube.find(MODELS, NS, "m") is None
    assert world.kube.all(STATEFULSETS) == []
    assert await world.look() is None, "a key that is gone is nothing"


async def test_deletion_never_waits_for_ever() -> None:
    world = World()
    world.model(updateStrategy={"drainTimeoutSeconds": 60})
    await world.steady()
    world.kube.edit(PODS, NS, "m-0", {"metadata": {"finalizers": ["test/holds"]}})
    world.kube.remove(MODELS, NS, "m")
    world.settle()
    await world.look()
    world.later(110)
    await world.look()
    assert world.kube.find(MODELS, NS, "m") is not None
    world.later(20)
    await world.look()
    assert world.kube.find(MODELS, NS, "m") is None
    assert any(reason == "DrainTimedOut" for _, reason, _ in world.kube.events())


async def test_a_spec_that_became_wrong_can_be_deleted() -> None:
    world = World()
    world.model()
    await world.steady()
    world.kube.edit(MODELS, NS, "m", {"spec": {"model": {"uri": "hf://noslash"}}})
    world.kube.remove(MODELS, NS, "m")
    await world.look()
    world.settle()
    await world.look()
    assert world.kube.find(MODELS, NS, "m") is None


def lose(world: World, *, reason: str | None = None, ready: str = "False") -> None:
    """The node controller's part: not ready, then evicted; the pod stays, because no kubelet ends it."""
    status = running()
    status["conditions"][2] |= {"status": ready} | ({"reason": reason} if reason else {})
    status["conditions"].append(
        {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "taint"}
    )
    world.kube.set_status(PODS, NS, "m-0", status)
    world.kube.edit(PODS, NS, "m-0", {"metadata": {"finalizers": ["test/node"]}})
    world.kube.remove(PODS, NS, "m-0")


def force_deleted(world: World) -> bool:
    """Whether the operator deleted the pod, beside the node controller."""
    return ("delete", "pods", NS, "m-0", "") in world.kube.writes()


async def test_a_pod_on_a_lost_node_is_replaced() -> None:
    world = World()
    world.model()
    await world.steady()
    world.kube.forget_requests()
    lose(world)
    await world.look()
    assert force_deleted(world)
    (found,) = [event for event in world.kube.events() if event[1] == "NodeLost"]
    assert found[0] == "Warning"
    assert "its node node is lost" in found[2]
    assert world.condition("Ready")[1] == "NodeLost"


async def test_a_pod_that_a_person_evicts_finishes_its_turns() -> None:
    world = World()
    world.model()
    await world.steady()
    world.kube.forget_requests()
    lose(world, ready="True")
    await world.look()
    assert not force_deleted(world)
    world.kube.set_status(PODS, NS, "m-0", {**running(), "conditions": []})
    lose(world, reason="ContainersNotReady")
    await world.look()
    assert not force_deleted(world), "its kubelet speaks"
    world.later(20)  # the stand-in gives no grace time: deletionTimestamp is when it was deleted
    await world.look()
    assert force_deleted(world), "a kubelet that lives would have ended it by now"


async def test_a_pod_of_an_old_revision_that_never_ran_is_replaced() -> None:
    world = World()
    world.model()
    await world.look()
    world.settle(ready=False)
    status: dict[str, Any] = loading()
    status["containerStatuses"][0] |= {"state": {"waiting": {"reason": "ImagePullBackOff"}}}
    world.kube.set_status(PODS, NS, "m-0", status)
    await world.look()
    assert not force_deleted(world), "of the newest revision"
    live = world.stateful_set()["status"]
    world.kube.set_status(STATEFULSETS, NS, "m", {**live, "updateRevision": "m-newer"})
    await world.look()
    assert force_deleted(world)
    assert any(reason == "StuckPodReplaced" for _, reason, _ in world.kube.events())


async def test_a_pod_of_an_old_revision_that_serves_or_served_is_left_to_the_rollout() -> None:
    world = World()
    world.model()
    await world.steady()
    live = world.stateful_set()["status"]
    world.kube.set_status(STATEFULSETS, NS, "m", {**live, "updateRevision": "m-newer"})
    await world.look()
    blip = running()
    blip["conditions"][2]["status"] = "False"
    blip["containerStatuses"][0]["ready"] = False
    world.kube.set_status(PODS, NS, "m-0", blip)
    await world.look()
    assert not force_deleted(world)


async def test_events_are_for_changes_that_a_person_cares_about() -> None:
    world = World()
    world.model()
    await world.steady()
    told = [(kind, reason) for kind, reason, _ in world.kube.events()]
    assert told == [("Normal", "Ready")]
    crashed = loading()
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "boom"}}
    crashed["containerStatuses"][0] |= {"restartCount": 1, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    crashed["containerStatuses"][0]["lastState"] = ended
    world.kube.set_status(PODS, NS, "m-0", crashed)
    for _ in range(5):
        await world.look()
        world.later(5)
    fresh = world.kube.events()[1:]
    assert [(kind, reason) for kind, reason, _ in fresh] == [("Warning", "CrashLoopBackOff")]
    assert "exit code 1, 1 restart: boom" in fresh[0][2]
    world.later(600)  # the same words are not said twice in ten minutes
    world.kube.set_status(PODS, NS, "m-0", running())
    await world.look()
    assert world.kube.events()[-1][:2] == ("Normal", "Ready")


async def test_a_status_that_cannot_be_written_any_more_is_no_error() -> None:
    world = World()
    world.model()
    await world.steady()
    world.engines.counts = None
    world.kube.set_status(PODS, NS, "m-0", loading())
    for status in (404, 409):
        world.kube.fail(status, "patch", MODELS)
        await world.look()


async def test_engines_that_serve_are_asked_now_and_then() -> None:
    world = World()
    world.model()
    await world.steady()
    world.engines.asked.clear()
    for _ in range(60):
        world.later(1)
        await world.look()
    assert len(world.engines.asked) <= 4
    assert world.status()["snapshots"]["count"] == 3
    world.engines.silent = True
    world.later(60)
    await world.look()
    assert world.status()["snapshots"]["count"] == 3, "what they said last"
