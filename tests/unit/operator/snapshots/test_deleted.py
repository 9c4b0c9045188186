"""`kubectl delete snapshot`: the bytes go first, by an engine or by a Job, and nobody's silence counts as gone."""

from __future__ import annotations

from contextlib import suppress

import pytest

from engram_operator.kube.errors import KubeError
from engram_operator.kube.kinds import JOBS, MODELS, PODS, POLICIES, SNAPSHOTS
from engram_operator.resources.snapshot import FINALIZER
from tests.support.snapshot_world import NS, SnapshotWorld


@pytest.fixture
async def world(tmp_path):
    async with SnapshotWorld(tmp_path) as world:
        world.policy(publish={"mode": "None"})
        world.model()
        yield world


async def taken(world, name="s", conversation="my chat", **spec):
    """A Snapshot that is Ready."""
    engine = world.engines.get("m-0") or await world.pod()
    engine.live.setdefault(conversation, 1)
    world.request(name, conversation, **spec)
    await world.settle(2)
    assert world.status(name)["phase"] == "Ready"
    return engine


async def test_an_engine_deletes_the_bytes_and_the_object_goes(world):
    engine = await taken(world)
    world.kube.forget_requests()
    world.delete("s")
    await world.settle(2)
    assert (world.snapshot(), world.bucket.snapshots) == (None, {})
    assert world.kube.writes() == [("patch", "snapshots", NS, "s", "")]  # the finalizer, and nothing else
    assert len(engine.calls("DELETE")) == 1


async def test_every_boundary_of_the_turn_goes(world):
    await world.pod()
    history = world.bucket.add("c", 2, "history")
    end = world.bucket.add("c", 2, "turn_end")
    world.kube.edit(POLICIES, NS, "default", {"spec": {"publish": {"mode": "Latest"}}})
    await world.settle(2)
    (name,) = world.names()
    assert world.status(name)["snapshotID"] == end["snapshot_id"]
    assert {entry["snapshotID"] for entry in world.status(name)["boundaries"]} == {
        history["snapshot_id"],
        end["snapshot_id"],
    }
    world.delete(name)
    await world.settle(60)
    assert (world.names(), world.bucket.snapshots) == ([], {})


async def test_what_is_gone_already_is_done(world):
    await taken(world)
    world.bucket.snapshots.clear()
    world.delete("s")
    await world.settle(2)
    assert world.snapshot() is None


async def test_a_store_that_refuses_keeps_the_object_and_says_why(world):
    engine = await taken(world)
    engine.denied = True
    world.delete("s")
    await world.settle(3600)
    status = world.status()
    assert (status["phase"], status["readyToUse"]) == ("Deleting", False)
    assert world.condition(kind="DataDeleted") == ("False", "AccessDenied")
    assert len(engine.calls("DELETE")) < 30  # slowly, for ever
    assert ("Warning", "AccessDenied", "the bytes are not deleted: the bucket refused it") in world.kube.events()
    assert world.jobs() == []
    engine.denied = False
    await world.settle(301)
    assert (world.snapshot(), world.bucket.snapshots) == (None, {})


async def test_data_can_be_abandoned(world):
    engine = await taken(world)
    engine.denied = True
    world.delete("s")
    await world.settle(30)
    world.kube.edit(SNAPSHOTS, NS, "s", {"metadata": {"annotations": {"engram.dev/abandon-data": "true"}}})
    await world.settle(1)
    assert world.snapshot() is None
    assert len(world.bucket.snapshots) == 1
    (uri,) = [record["uri"] for record in world.bucket.snapshots.values()]
    assert any(reason == "DataAbandoned" and uri in note for _, reason, note in world.kube.events())


@pytest.mark.parametrize(("own", "policy", "kept"), [(None, "Retain", True), ("Delete", "Retain", False)])
async def test_retain_keeps_the_bytes(world, own, policy, kept):
    world.kube.edit(POLICIES, NS, "default", {"spec": {"deletionPolicy": policy}})
    await taken(world, **({"deletionPolicy": own} if own else {}))
    world.delete("s")
    await world.settle(2)
    assert world.snapshot() is None
    assert bool(world.bucket.snapshots) is kept


async def test_the_policys_word_is_that_of_when_it_was_made(world):
    await taken(world)
    world.kube.edit(POLICIES, NS, "default", {"spec": {"deletionPolicy": "Retain"}})
    world.delete("s")
    await world.settle(2)
    assert world.bucket.snapshots == {}


async def test_bytes_that_another_object_stands_for_stay(world):
    await taken(world)
    world.adopt("twin", world.status()["snapshotID"])
    await world.settle(2)
    world.delete("s")
    await world.settle(2)
    assert world.names() == ["twin"]
    assert len(world.bucket.snapshots) == 1
    world.delete("twin")
    await world.settle(2)
    assert (world.names(), world.bucket.snapshots) == ([], {})


async def test_a_request_that_was_never_taken_just_goes(world):
    world.request()
    await world.settle(2)
    world.delete("s")
    await world.settle(2)
    assert world.snapshot() is None


async def test_what_a_lost_answer_left_behind_goes_too(world):
    engine = await world.pod()
    engine.live["my chat"], engine.hang_after = 1, True
    world.request()
    await world.settle(1)
    engine.hang_after = False
    world.delete("s")
    await world.settle(2)
    assert (world.snapshot(), world.bucket.snapshots) == (None, {})


async def test_without_an_engine_a_job_deletes(world):
    await taken(world)
    snapshot_id = world.status()["snapshotID"]
    await world.lose_pod("m-0")
    world.delete("s")
    await world.settle(3)
    (job,) = [job for job in world.jobs() if "erase" in job["metadata"]["name"]]
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[:3] == ["snapshots", "rm", snapshot_id]
    assert args[args.index("--store") + 1] == "s3://bucket/prefix"
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "m-engine"
    assert world.status()["phase"] == "Deleting"
    world.end_job(job["metadata"]["name"])
    await world.settle(2)
    assert world.snapshot() is None


async def test_many_deletions_are_one_job(world):
    for number in range(12):
        await taken(world, f"s{number}", f"chat {number}")
    await world.lose_pod("m-0")
    for number in range(12):
        world.delete(f"s{number}")
    await world.settle(3)
    (job,) = [job for job in world.jobs() if "erase" in job["metadata"]["name"]]
    assert len(job["spec"]["template"]["spec"]["containers"][0]["args"]) >= 14
    world.end_job(job["metadata"]["name"])
    await world.settle(2)
    assert world.names() == []


async def test_a_job_that_fails_says_why_and_another_is_made_later(world):
    await taken(world)
    await world.lose_pod("m-0")
    world.delete("s")
    await world.settle(3)
    name = world.jobs()[0]["metadata"]["name"]
    world.end_job(name, failed="BackoffLimitExceeded", message="AccessDenied: the bucket refused it")
    await world.settle(1)
    assert world.condition(kind="DataDeleted") == ("False", "AccessDenied")
    assert len(world.jobs()) == 1
    await world.settle(10)
    erasing = [job for job in world.jobs() if "erase" in job["metadata"]["name"]]
    assert len(erasing) == 2
    world.end_job(next(job["metadata"]["name"] for job in erasing if job["metadata"]["name"] != name))
    await world.settle(2)
    assert world.snapshot() is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("engram: BucketMissing: cannot read format/heads: NoSuchBucket: None", "BucketNotFound"),
        ('engram: cannot read format/heads: Could not connect to the endpoint URL: "http://s:9/b"', "Unreachable"),
        ("engram: something else", "JobFailed"),
    ],
)
async def test_a_jobs_last_words_become_a_reason(world, words, reason):
    await taken(world)
    await world.lose_pod("m-0")
    world.delete("s")
    await world.settle(3)
    world.end_job(world.jobs()[0]["metadata"]["name"], failed="BackoffLimitExceeded", message=words)
    await world.settle(1)
    assert world.condition(kind="DataDeleted") == ("False", reason)


async def test_an_engine_that_comes_back_is_not_needed_by_a_job(world):
    """A Job that waits for ever, and a model that runs again: both may do it, and the object goes once."""
    await taken(world)
    await world.lose_pod("m-0")
    world.delete("s")
    await world.settle(3)
    world.kube.store.handle("DELETE", JOBS.path(NS, world.jobs()[0]["metadata"]["name"]), {}, None, "")
    await world.pod()
    await world.settle(61)
    assert (world.snapshot(), world.bucket.snapshots) == (None, {})


async def test_an_ending_namespace_takes_no_job_so_the_object_goes(world):
    await taken(world)
    await world.lose_pod("m-0")
    world.kube.fail(
        403, "create", JOBS, times=None, message="forbidden: unable to create new content in namespace default because"
        " it is being terminated"
    )  # fmt: skip
    uri = world.status()["uri"]
    world.delete("s")
    await world.settle(3)
    assert world.snapshot() is None
    assert any(reason == "NamespaceTerminating" and uri in note for _, reason, note in world.kube.events())


async def test_a_namespace_that_ends_does_not_wait_for_engines_whose_store_is_gone(world):
    engine = await taken(world)
    engine.denied = True
    world.kube.edit(MODELS, NS, "m", {"metadata": {"finalizers": ["engram.dev/drain"]}})
    world.kube.remove(MODELS, NS, "m")
    text = "forbidden: unable to create new content in namespace default because it is being terminated"
    world.kube.fail(403, "create", JOBS, times=None, message=text)
    world.delete("s")
    await world.settle(3)
    assert world.snapshot() is None
    assert any(reason == "NamespaceTerminating" for _, reason, _ in world.kube.events())


async def test_a_job_that_vanishes_with_its_namespace_holds_nobody_up(world):
    """Neither whom it worked for, nor who waits in line behind it."""
    await taken(world)
    await taken(world, "behind", "another chat")
    await world.lose_pod("m-0")
    world.delete("s")
    await world.settle(3)
    (job,) = world.jobs()
    world.delete("behind")
    await world.settle(3)
    text = "forbidden: unable to create new content in namespace default because it is being terminated"
    world.kube.fail(403, "create", JOBS, times=None, message=text)
    world.kube.store.handle("DELETE", JOBS.path(NS, job["metadata"]["name"]), {}, None, "")
    await world.settle(3)
    assert (world.snapshot(), world.snapshot("behind")) == (None, None)


async def test_a_quota_is_no_end_of_a_namespace(world):
    await taken(world)
    await world.lose_pod("m-0")
    world.kube.fail(403, "create", JOBS, times=None, message="exceeded quota: jobs")
    world.delete("s")
    await world.settle(10)
    assert world.condition(kind="DataDeleted") == ("False", "JobRefused")
    assert world.status()["error"]["message"] == "exceeded quota: jobs"


async def test_without_policy_and_model_the_status_knows_the_store(world):
    await taken(world)
    await world.lose_pod("m-0")
    world.kube.remove(POLICIES, NS, "default")
    world.delete("s")
    await world.settle(3)
    (job,) = world.jobs()
    spec = job["spec"]["template"]["spec"]
    args = spec["containers"][0]["args"]
    assert args[args.index("--store") + 1] == "s3://bucket/prefix"
    secrets = [source["secret"]["name"] for source in spec["volumes"][-1]["projected"]["sources"]]
    assert secrets == ["s3", "s3"]


@pytest.mark.parametrize("change", ["store", "abi", "restart"])
async def test_an_engine_that_cannot_know_proves_nothing(world, change):
    """Another store or state_abi: its 404 says nothing, so a Job is asked."""
    engine = await taken(world)
    kept = dict(world.bucket.snapshots)
    world.bucket.snapshots.clear()  # this engine does not see it
    pod = world.kube.find(PODS, NS, "m-0")
    if change == "store":
        pod["spec"]["containers"][0]["args"] = ["serve", "--snapshot-store", "s3://another/place"]
        world.kube.put(pod)
    elif change == "abi":
        engine.state_abi = "abi2"
    else:
        pod["spec"]["containers"][0]["args"] = ["serve"]
        world.kube.put(pod)
    world.delete("s")
    await world.settle(3)
    assert world.snapshot() is not None
    assert len([job for job in world.jobs() if "erase" in job["metadata"]["name"]]) == 1
    world.bucket.snapshots.update(kept)


@pytest.mark.parametrize(
    "fault",
    [(404, None), (404, "snapshots_disabled"), (401, None), (403, None), (500, None), (200, "not_found"), (405, None)],
)
async def test_no_other_answer_is_taken_for_a_deletion(world, fault):
    engine = await taken(world)
    engine.answer = fault
    world.delete("s")
    await world.settle(1)
    assert world.snapshot() is not None
    assert FINALIZER in world.snapshot()["metadata"]["finalizers"]
    assert len(world.bucket.snapshots) == 1


async def test_engines_that_never_answer_are_given_up_for_a_job(world):
    engine = await taken(world)
    engine.answer = (401, "invalid_api_key")
    world.delete("s")
    await world.settle(60)
    assert len([job for job in world.jobs() if "erase" in job["metadata"]["name"]]) == 1


async def test_a_deletion_survives_the_operator_at_every_step(world):
    """Whatever write is the last one of an operator, the next one ends it, and no byte is left."""
    for failing in range(4):
        engine = await taken(world, f"s{failing}", f"chat {failing}")
        world.delete(f"s{failing}")
        failure = world.kube.fail(500, "patch", SNAPSHOTS, times=1, after=bool(failing % 2))
        controller = world.controllers["SnapshotController"]
        for _ in range(3):
            with suppress(KubeError):  # the queue's to repeat
                await controller.reconcile(NS, f"s{failing}")
        failure.times = 0
        await world.settle(5)
        assert world.snapshot(f"s{failing}") is None
        assert world.bucket.snapshots == {}
    assert len(engine.calls("DELETE")) >= 4
