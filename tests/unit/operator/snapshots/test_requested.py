"""A Snapshot that a user asks for: taken, retried, changed, lost. Against a loopback engine."""

from __future__ import annotations

import pytest

from engram_operator.errors import ResourceError
from engram_operator.kube.kinds import PODS, SNAPSHOTS
from engram_operator.resources.snapshot import FINALIZER, Snapshot
from tests.support.fake_engine_admin import keyed_hash
from tests.support.snapshot_world import NS, SnapshotWorld


@pytest.fixture
async def world(tmp_path):
    async with SnapshotWorld(tmp_path) as world:
        world.policy(publish={"mode": "None"})
        world.model()
        yield world


async def test_it_is_taken_and_the_status_tells_the_whole_story(world):
    engine = await world.pod()
    engine.live["my chat"] = 3
    world.request(pinned=True)
    await world.settle(2)
    status = world.status()
    assert (status["phase"], status["readyToUse"], status["turn"], status["tokens"]) == ("Ready", True, 3, 400)
    assert (status["sizeBytes"], status["size"]) == (16384, "16.0Ki")
    assert status["conversationHash"] == keyed_hash("my chat")[:10]
    assert (status["branch"], status["boundary"], status["observedGeneration"]) == ("main", "Manual", 1)
    assert status["capturedBy"]["podName"] == "m-0"
    assert status["compatibility"] == {"stateABI": "abi1", "modelDigest": "d1"}
    assert status["storage"] == {"region": "us-east-1", "forcePathStyle": False, "credentialsSecretName": "s3"}
    assert status["uri"].startswith("s3://bucket/prefix/v1/")
    assert world.condition() == ("True", "Stored")
    body = engine.calls("POST", "/snapshots")[0][2]
    assert (body["conversation_id"], body["pin"], body["branch_name"]) == ("my chat", True, "main")
    assert FINALIZER in world.snapshot()["metadata"]["finalizers"]
    assert world.snapshot()["metadata"]["annotations"] == {"engram.dev/deletion-policy": "Delete"}


async def test_what_is_settled_costs_nothing(world):
    engine = await world.pod()
    engine.live["my chat"] = 3
    world.request()
    await world.settle(2)
    world.kube.forget_requests()
    requests = len(engine.requests)
    for _ in range(3):
        world.enqueue(SNAPSHOTS, NS, "s")
        await world.settle()
    assert world.kube.writes() == []
    assert len(engine.requests) == requests


async def test_the_users_spec_is_never_written(world):
    engine = await world.pod()
    engine.live["my chat"] = 3
    spec = world.request()["spec"]
    await world.settle(2)
    assert world.snapshot()["spec"] == spec


async def test_it_waits_for_an_engine_without_being_looked_at(world):
    world.request()
    await world.settle(600)
    assert world.condition() == ("False", "NoEngine")
    assert world.status()["phase"] == "Pending"
    looks = world.looks["SnapshotController"]
    await world.settle(3600)
    assert world.looks["SnapshotController"] == looks
    engine = await world.pod()
    engine.live["my chat"] = 1
    await world.settle(2)
    assert world.status()["phase"] == "Ready"


async def test_without_a_model_it_says_so(world):
    world.kube.put(world._snapshot("t", {"modelRef": {"name": "nobody"}, "source": {"conversation": {"id": "c"}}}))
    await world.settle(2)
    assert world.condition("t") == ("False", "ModelNotFound")


async def test_the_home_is_asked_first_and_then_the_others(world):
    engines = [await world.pod(ordinal=ordinal) for ordinal in range(3)]
    engines[1].live["my chat"] = 2
    world.request()
    await world.settle(2)
    assert world.status()["capturedBy"]["podName"] == "m-1"
    assert sum(len(engine.calls("POST")) for engine in engines) <= 3


async def test_a_conversation_that_nobody_knows_fails_after_a_few_tries(world):
    engine = await world.pod()
    world.request(conversation="secret words")
    await world.settle(60)
    status = world.status()
    assert (status["phase"], status["error"]["attempts"]) == ("Failed", 3)
    assert world.condition() == ("False", "ConversationNotFound")
    assert len(engine.calls("POST", "/snapshots")) == 3
    said = str(world.kube.events()) + str(status)
    assert "secret words" not in said  # a user's words stay in the spec


async def test_a_store_that_refuses_is_asked_ever_more_rarely(world):
    engine = await world.pod()
    engine.live["my chat"], engine.denied = 1, True
    world.request()
    await world.settle(3600)
    status = world.status()
    assert (status["phase"], world.condition()) == ("Pending", ("False", "AccessDenied"))
    assert 12 <= status["error"]["attempts"] <= 24
    assert [event for event in world.kube.events() if event[1] == "AccessDenied"] != []
    engine.denied = False
    await world.settle(301)
    assert world.status()["phase"] == "Ready"
    assert "error" not in world.status()


async def test_a_lost_answer_is_found_again_not_taken_twice(world):
    engine = await world.pod()
    engine.live["my chat"] = 1
    engine.hang_after = True
    world.request()
    await world.settle(1)
    assert world.status()["phase"] == "Capturing"
    engine.hang_after = False
    await world.settle(60)
    assert world.status()["phase"] == "Ready"
    assert len(world.bucket.snapshots) == 1
    assert len(engine.calls("POST", "/snapshots")) == 1


async def test_an_operator_that_died_while_taking_one_goes_on(world):
    engine = await world.pod()
    engine.live["my chat"] = 1
    obj = world.request()
    record = world.bucket.add("my chat", 1, "manual", tag=f"snapshot-{obj['metadata']['uid']}")
    world.kube.edit(SNAPSHOTS, NS, "s", {"metadata": {"finalizers": [FINALIZER]}})
    world.kube.set_status(SNAPSHOTS, NS, "s", {"phase": "Capturing", "observedGeneration": 1})
    await world.settle(2)
    assert world.status()["snapshotID"] == record["snapshot_id"]
    assert engine.calls("POST") == []


async def test_a_cache_that_lags_takes_none_twice(world):
    """The events of the writes come late; meanwhile the object is looked at again."""
    engine = await world.pod()
    engine.live["my chat"] = 1
    world.request()
    controller = world.controllers["SnapshotController"]
    await controller.reconcile(NS, "s")
    world.kube.follow = False
    for _ in range(4):
        await controller.reconcile(NS, "s")  # the first time while the engine is at it
        await world.finish_calls()
    assert len(world.bucket.snapshots) == 1
    assert world.status()["phase"] == "Ready"


async def test_pin_and_lifetime_are_passed_on_when_they_change(world):
    engine = await world.pod()
    engine.live["my chat"] = 1
    world.request()
    await world.settle(2)
    world.kube.edit(SNAPSHOTS, NS, "s", {"spec": {"pinned": True, "ttlSeconds": 3600}})
    await world.settle(2)
    assert engine.calls("PATCH")[0][2] == {"pinned": True, "ttl_seconds": 3600}
    assert world.status()["observedGeneration"] == 2
    assert world.status()["expirationTime"] == "2025-10-09T09:53:20Z"
    world.kube.edit(SNAPSHOTS, NS, "s", {"spec": {"ttlSeconds": None}})
    await world.settle(2)
    assert engine.calls("PATCH")[1][2] == {"pinned": True, "ttl_seconds": None}
    assert "expirationTime" not in world.status()


async def test_a_change_that_does_not_arrive_leaves_it_ready(world):
    engine = await world.pod()
    engine.live["my chat"] = 1
    world.request()
    await world.settle(2)
    engine.denied = True
    world.kube.edit(SNAPSHOTS, NS, "s", {"spec": {"pinned": True}})
    await world.settle(20)
    status = world.status()
    assert (status["phase"], status["readyToUse"], status["observedGeneration"]) == ("Ready", True, 1)
    assert status["error"]["attempts"] >= 2
    engine.denied = False
    await world.settle(300)
    assert world.status()["observedGeneration"] == 2
    assert "error" not in world.status()


async def test_one_that_is_stored_is_adopted(world):
    await world.pod()
    record = world.bucket.add("c", 5, "turn_end")
    world.adopt("kept", record["snapshot_id"], pinned=True)
    await world.settle(2)
    assert (world.status("kept")["turn"], world.status("kept")["phase"]) == (5, "Ready")
    assert world.bucket.snapshots[record["snapshot_id"]]["pinned"] is True


async def test_adopting_what_the_store_does_not_hold(world):
    await world.pod()
    world.adopt("kept", "0" * 32)
    await world.settle(5)
    assert (world.status("kept")["phase"], world.condition("kept")) == ("Failed", ("False", "DataLost"))


async def test_what_the_store_deleted_is_data_lost_and_what_ran_out_is_expired(world):
    engine = await world.pod()
    engine.live |= {"my chat": 1, "other": 1}
    world.request()
    world.request("t", "other", ttlSeconds=60)
    await world.settle(2)
    for name in ("s", "t"):
        world.bucket.remove(world.status(name)["snapshotID"])
    await world.settle(400)
    assert (world.status("s")["phase"], world.condition("s")) == ("Failed", ("False", "DataLost"))
    assert (world.status("t")["phase"], world.condition("t")) == ("Expired", ("False", "Expired"))


async def test_another_store_is_no_loss(world):
    """During a rollout to another store, an engine that never heard of a snapshot proves nothing."""
    engine = await world.pod()
    engine.live["my chat"] = 1
    world.request()
    await world.settle(2)
    pod = world.kube.find(PODS, NS, "m-0")
    pod["spec"]["containers"][0]["args"] = ["serve", "--snapshot-store", "s3://another/place"]
    world.kube.put(pod)
    world.bucket.remove(world.status()["snapshotID"])
    await world.settle(400)
    assert world.status()["phase"] == "Ready"


@pytest.mark.parametrize("conversation", ["  padded", "with\nline"])
def test_words_that_no_engine_takes_are_refused_where_they_are_read(conversation):
    document = {
        "metadata": {"name": "s"},
        "spec": {"modelRef": {"name": "m"}, "source": {"conversation": {"id": conversation}}},
    }
    with pytest.raises(ResourceError, match=r"conversation\.id"):
        Snapshot.parse(document)
