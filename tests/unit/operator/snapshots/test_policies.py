"""SnapshotPolicy: what its status says, what it tells its models, and when its store is swept."""

from __future__ import annotations

import pytest

from engram_operator.kube.kinds import JOBS, MODELS, POLICIES
from tests.support.snapshot_world import NS, SnapshotWorld

UNREACHABLE = {"reachable": False, "reason": "AccessDenied", "message": "no"}


@pytest.fixture
async def world(tmp_path):
    async with SnapshotWorld(tmp_path) as world:
        yield world


def status(world, name="default"):
    return world.kube.find(POLICIES, NS, name).get("status") or {}


def ready(world, name="default"):
    entry = next(entry for entry in status(world, name)["conditions"] if entry["type"] == "Ready")
    return entry["status"], entry["reason"], entry["message"]


def report(world, model, state, reason, message="", **counts):
    """As the model's controller writes it."""
    condition = {"type": "SnapshotsReady", "status": state, "reason": reason, "message": message}
    condition["lastTransitionTime"] = "2025-10-09T08:00:00Z"
    world.kube.set_status(MODELS, NS, model, {"conditions": [condition], "snapshots": counts})


async def test_it_sums_up_what_its_models_engines_report(world):
    world.policy()
    world.model("a")
    world.model("b")
    world.policy("other")
    world.model("c", snapshots={"policyRef": {"name": "other"}})
    await world.settle(2)
    assert ready(world)[:2] == ("Unknown", "NoReport")
    report(world, "a", "True", "StoreReachable", count=3, totalBytes=300, lastSuccessTime="2025-10-09T08:00:00Z")
    report(world, "b", "True", "StoreReachable", count=4, totalBytes=400, lastSuccessTime="2025-10-09T08:01:00Z")
    await world.settle(10)
    found = status(world)
    assert (found["models"], found["snapshots"], found["totalBytes"]) == (2, 7, 700)
    assert found["lastSuccessTime"] == "2025-10-09T08:01:00Z"
    assert ready(world)[:2] == ("True", "StoreReachable")
    assert status(world, "other")["models"] == 1


@pytest.mark.parametrize("reason", ["AccessDenied", "BucketNotFound", "TLSError", "Unreachable"])
async def test_the_stores_own_reason_and_words(world, reason):
    world.policy()
    world.model("a")
    await world.settle(10)
    report(world, "a", "False", reason, "a-0: the bucket says no")
    await world.settle(10)
    assert ready(world) == ("False", reason, 'EngramModel "a": a-0: the bucket says no')
    assert [event[:2] for event in world.kube.events()] == [("Warning", reason)]
    report(world, "a", "True", "StoreReachable")
    await world.settle(10)
    assert ready(world)[0] == "True"


async def test_a_store_on_a_pods_own_disk_is_refused(world):
    world.kube.put(
        {
            "apiVersion": "engram.dev/v1alpha1",
            "kind": "SnapshotPolicy",
            "metadata": {"name": "default", "namespace": NS},
            "spec": {"storage": {"uri": "file:///var/lib/states"}},
        }
    )
    await world.settle(2)
    found = ready(world)
    assert found[:2] == ("False", "InvalidPolicy")
    assert "file:///var/lib/states is for the local mode" in found[2]
    assert world.jobs() == []


async def test_a_changed_policy_is_a_change_of_its_models_and_a_status_is_not(world):
    world.policy(retention={"gcIntervalSeconds": 10_000_000})
    for number in range(20):
        world.model(f"m{number}")
    await world.settle(20)
    looks = world.looks["Publisher"]
    report(world, "m0", "True", "StoreReachable", count=1, totalBytes=10)
    await world.settle(20)
    assert status(world)["snapshots"] == 1
    assert world.looks["Publisher"] == looks + 1
    world.kube.edit(POLICIES, NS, "default", {"spec": {"suspend": True}})
    await world.settle(2)
    assert world.looks["Publisher"] == looks + 21
    world.kube.remove(POLICIES, NS, "default")
    await world.settle(2)
    assert world.looks["Publisher"] == looks + 41


async def test_counts_that_change_all_the_time_are_written_now_and_then(world):
    world.policy(retention={"gcIntervalSeconds": 10_000_000})
    world.model("a")
    await world.settle(10)
    world.kube.forget_requests()
    for number in range(100):
        report(world, "a", "True", "StoreReachable", count=number, totalBytes=number)
        await world.settle(0.5)
    await world.settle(10)
    writes = [write for write in world.kube.writes() if write[1] == "snapshotpolicies"]
    assert len(writes) <= 13
    assert status(world)["snapshots"] == 99


async def test_idle_costs_no_write(world):
    world.policy(retention={"gcIntervalSeconds": 10_000_000})
    world.model("a")
    report(world, "a", "True", "StoreReachable", count=1, totalBytes=1)
    await world.settle(60)
    world.kube.forget_requests()
    world.enqueue(POLICIES, NS, "default")
    await world.settle(1800)
    assert world.kube.writes() == []


async def test_an_engine_sweeps_once_in_an_interval(world):
    world.policy(retention={"gcIntervalSeconds": 600})
    world.model("m")
    await world.pod("m", 0)
    await world.pod("m", 1)
    await world.settle(3000)
    assert 4 <= world.bucket.swept <= 5  # one of the engines: each would sweep the whole store
    assert status(world)["lastGcDeleted"] == 2
    assert status(world)["lastGcTime"].startswith("2025-10-09T09:")


async def test_where_no_engine_runs_a_job_sweeps(world):
    world.policy(retention={"gcIntervalSeconds": 600, "maxAge": "7d", "maxTotalSize": "5Gi"})
    for number in range(50):
        world.model(f"m{number}", suspend=True)
    await world.settle(660)
    (job,) = world.jobs()  # one for the store, not one for each model
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[:2] == ["snapshots", "sweep"]
    assert args[args.index("--retention-max-age") + 1] == "7d"
    world.end_job(job["metadata"]["name"], message='a word\n{"snapshots_deleted": 9, "files_deleted": 3}')
    await world.settle(2)
    assert status(world)["lastGcDeleted"] == 9
    await world.settle(599)
    assert len(world.jobs()) == 2


async def test_a_sweep_that_fails_is_tried_again_sooner_than_in_an_interval(world):
    world.policy(retention={"gcIntervalSeconds": 100_000})
    world.model("m")
    await world.settle(100_010)
    world.end_job(world.jobs()[0]["metadata"]["name"], failed="BackoffLimitExceeded")
    await world.settle(400)
    assert len(world.jobs()) == 2
    assert "lastGcTime" not in status(world)


async def test_an_engine_that_cannot_sweep_is_no_reason_for_a_job(world):
    world.policy(retention={"gcIntervalSeconds": 600})
    world.model("m")
    engine = await world.pod()
    engine.denied = True
    await world.settle(3600)
    assert world.jobs() == []
    assert 6 <= len(engine.calls("POST", "/snapshots/sweep")) <= 12
    assert ("Warning", "AccessDenied", "the store was not swept: the bucket refused it") in world.kube.events()


async def test_suspended_deletes_nothing(world):
    world.policy(suspend=True, retention={"gcIntervalSeconds": 60})
    world.model("m")
    await world.pod()
    await world.settle(10_000)
    assert (world.bucket.swept, world.jobs()) == (0, [])


async def test_a_policy_that_goes_takes_nothing_with_it(world):
    """Its deletionPolicy was each Snapshot's from the start; deleting the policy deletes no byte and no object."""
    world.policy()
    world.model("m")
    engine = await world.pod()
    world.bucket.add("c", 1)
    engine.live["mine"] = 1
    world.request("mine", "mine")
    await world.settle(40)
    before = sorted(world.names())
    world.kube.remove(POLICIES, NS, "default")
    await world.settle(600)
    assert sorted(world.names()) == before
    assert len(world.bucket.snapshots) == 2
    assert engine.calls("DELETE") == []


async def test_a_job_that_is_not_allowed_is_said(world):
    world.policy(retention={"gcIntervalSeconds": 600})
    world.model("m")
    world.kube.fail(403, "create", JOBS, times=None, message="exceeded quota")
    await world.settle(700)
    assert ("Warning", "JobRefused", "the store was not swept: exceeded quota") in world.kube.events()
