"""The published view: newest first, bounded, still when nothing happens, and nothing deleted comes back."""

from __future__ import annotations

import pytest

from engram_operator.kube.kinds import MODELS, POLICIES, SNAPSHOTS
from tests.support.fake_engine_admin import keyed_hash
from tests.support.snapshot_world import NS, SnapshotWorld

LATER = 40.0  # longer than the slowest poll


@pytest.fixture
async def world(tmp_path):
    async with SnapshotWorld(tmp_path) as world:
        world.policy(publish={"limit": 3}, retention={"gcIntervalSeconds": 10_000_000})
        world.model()
        await world.pod()
        yield world


async def test_a_turn_gets_an_object_that_tells_of_it(world):
    record = world.bucket.add("my chat", 4, "turn_end")
    await world.settle(2)
    name = f"m-{keyed_hash('my chat')[:10]}-t4"
    assert world.names() == [name]
    obj = world.snapshot(name)
    assert obj["spec"] == {
        "modelRef": {"name": "m"},
        "policyRef": {"name": "default"},
        "source": {"snapshotID": record["snapshot_id"]},
        "deletionPolicy": "Delete",
        "pinned": False,
    }
    assert "ownerReferences" not in obj["metadata"]
    assert obj["metadata"]["labels"]["engram.dev/conversation"] == keyed_hash("my chat")[:10]
    assert (obj["status"]["phase"], obj["status"]["turn"], obj["status"]["boundary"]) == ("Ready", 4, "TurnEnd")
    assert obj["status"]["creationTime"] == "2025-10-09T08:53:20Z"
    assert obj["status"]["compatibility"]["stateABI"] == "abi1"


async def test_a_new_turn_costs_two_writes_and_another_boundary_one(world):
    world.bucket.add("c", 1, "history")
    await world.settle(2)
    await world.settle(LATER)
    world.kube.forget_requests()
    world.bucket.add("c", 2, "history")
    await world.settle(LATER)
    snapshots = [write for write in world.kube.writes() if write[1] == "snapshots"]
    assert [(verb, sub) for verb, _, _, _, sub in snapshots] == [("create", ""), ("patch", "status")]
    world.kube.forget_requests()
    end = world.bucket.add("c", 2, "turn_end", tokens=999)
    await world.settle(LATER)
    (write,) = [write for write in world.kube.writes() if write[1] == "snapshots"]
    assert write[0::4] == ("patch", "status")
    assert world.status(write[3])["snapshotID"] == end["snapshot_id"]


async def test_idle_costs_a_request_now_and_then_and_no_write(world):
    for turn in range(3):
        world.bucket.add("c", turn)
    await world.settle(120)
    engine = world.engines["m-0"]
    world.kube.forget_requests()
    before = len(engine.requests)
    await world.settle(600)
    assert world.kube.writes(events=True) == []
    asked = engine.requests[before:]
    assert {path.split("?")[0] for _, path, _ in asked} == {"/snapshots/events"}
    assert 15 <= len(asked) <= 25


async def test_events_of_a_model_are_no_reason_to_ask_its_engine(world):
    await world.settle(60)
    engine = world.engines["m-0"]
    before = len(engine.requests)
    for number in range(50):
        world.kube.edit(MODELS, NS, "m", {"metadata": {"annotations": {"n": str(number)}}})
        await world.settle()
    assert len(engine.requests) - before <= 1


async def test_the_newest_are_kept_and_no_byte_goes_with_an_object(world):
    for turn in range(10):
        world.bucket.add("c", turn)
        await world.settle(LATER)
    assert sorted(world.status(name)["turn"] for name in world.names()) == [7, 8, 9]
    assert len(world.bucket.snapshots) == 10
    assert world.engines["m-0"].calls("DELETE") == []


async def test_a_start_publishes_the_newest_only(world):
    for turn in range(1200):
        world.bucket.add("c", turn)
    await world.settle(LATER)
    assert sorted(world.status(name)["turn"] for name in world.names()) == [1197, 1198, 1199]
    assert len(world.engines["m-0"].calls("GET", "/snapshots?")) == 1


async def test_pinned_and_requested_ones_never_count_out(world):
    pinned = world.bucket.add("c", 0, pinned=True)
    await world.settle(LATER)
    world.engines["m-0"].live["mine"] = 7
    world.request("mine", "mine")
    await world.settle(2)
    user_pinned = world.bucket.add("c", 1)
    await world.settle(LATER)
    name = f"m-{keyed_hash('c')[:10]}-t1"
    world.kube.edit(SNAPSHOTS, NS, name, {"spec": {"pinned": True}})
    await world.settle(2)
    assert world.bucket.snapshots[user_pinned["snapshot_id"]]["pinned"] is True
    for turn in range(2, 12):
        world.bucket.add("c", turn)
    await world.settle(LATER)
    turns = sorted(world.status(name)["turn"] for name in world.names() if name != "mine")
    assert turns == [0, 1, 9, 10, 11]
    assert "mine" in world.names()
    assert world.status(f"m-{keyed_hash('c')[:10]}-t0")["snapshotID"] == pinned["snapshot_id"]
    assert [name for name in world.names() if keyed_hash("mine")[:10] in name] == []  # one object a turn


async def test_what_retention_deletes_leaves_the_view(world):
    records = [world.bucket.add("c", turn) for turn in range(3)]
    await world.settle(LATER)
    world.bucket.remove(records[0]["snapshot_id"])
    await world.settle(LATER)
    assert sorted(world.status(name)["turn"] for name in world.names()) == [1, 2]
    assert world.engines["m-0"].calls("DELETE") == []


async def test_after_deletions_older_ones_come_into_view(world):
    records = [world.bucket.add("c", turn) for turn in range(100)]
    await world.settle(LATER)
    for record in records[40:]:
        world.bucket.remove(record["snapshot_id"])
    await world.settle(200)
    assert sorted(world.status(name)["turn"] for name in world.names()) == [37, 38, 39]


async def test_nothing_deleted_comes_back(world):
    records = [world.bucket.add("c", turn) for turn in range(3)]
    await world.settle(LATER)
    world.delete(f"m-{keyed_hash('c')[:10]}-t2")
    await world.settle(2)
    # A replica whose listing is a moment old still shows it.
    world.bucket.snapshots[records[2]["snapshot_id"]] = records[2]
    world.bucket.forget_events()
    await world.settle(300)
    assert sorted(world.status(name)["turn"] for name in world.names()) == [0, 1]


async def test_under_retain_what_was_taken_out_of_view_stays_out_over_restarts(world, tmp_path):
    world.kube.edit(POLICIES, NS, "default", {"spec": {"deletionPolicy": "Retain"}})
    record = world.bucket.add("c", 1)
    await world.settle(LATER)
    world.delete(world.names()[0])
    await world.settle(LATER)
    assert (world.names(), len(world.bucket.snapshots)) == ([], 1)
    status = world.kube.find(POLICIES, NS, "default")["status"]
    assert status["unpublished"] == [{"modelName": "m", "snapshotID": record["snapshot_id"]}]
    await world.restart()
    await world.settle(LATER)
    assert world.names() == []
    world.bucket.remove(record["snapshot_id"])
    await world.settle(LATER)
    world.bucket.add("c", 2)
    await world.settle(LATER)
    assert "unpublished" not in world.kube.find(POLICIES, NS, "default")["status"]


async def test_an_operator_that_died_while_taking_one_out_of_view_deletes_no_byte(world):
    for turn in range(3):
        world.bucket.add("c", turn)
    await world.settle(LATER)
    failure = world.kube.fail(500, "delete", SNAPSHOTS, times=1)
    world.bucket.add("c", 3)
    for _ in range(4):
        try:
            await world.settle(LATER)
        except Exception as error:
            assert "injected" in str(error)  # noqa: PT017
    failure.times = 0
    await world.restart()
    await world.settle(LATER)
    assert sorted(world.status(name)["turn"] for name in world.names()) == [1, 2, 3]
    assert len(world.bucket.snapshots) == 4


async def test_a_restarted_engine_is_listed_again(world):
    world.bucket.add("c", 1)
    await world.settle(LATER)
    world.bucket.forget_events()
    world.bucket.add("c", 2)
    await world.settle(LATER)
    assert sorted(world.status(name)["turn"] for name in world.names()) == [1, 2]


async def test_a_restarted_operator_writes_nothing_again(world):
    for turn in range(3):
        world.bucket.add("c", turn)
    await world.settle(LATER)
    world.kube.forget_requests()
    await world.restart()
    await world.settle(LATER)
    assert world.kube.writes() == []


async def test_two_branches_at_one_turn_are_two_objects(world):
    world.bucket.add("c", 1)
    fork = world.bucket.add("c", 1, branch="what-if")
    await world.settle(LATER)
    base = f"m-{keyed_hash('c')[:10]}-t1"
    assert len(world.names()) == 2
    assert base in world.names()
    assert {world.status(name)["branch"] for name in world.names()} == {
        keyed_hash("branch main")[:10],
        keyed_hash("branch what-if")[:10],
    }
    assert fork["snapshot_id"] in {world.status(name)["snapshotID"] for name in world.names()}


@pytest.mark.parametrize(("mode", "turns"), [("None", []), ("Requested", [1, 2]), ("Latest", [0, 1, 2])])
async def test_modes(world, mode, turns):
    world.kube.edit(POLICIES, NS, "default", {"spec": {"publish": {"mode": mode}}})
    world.bucket.add("c", 0)
    world.bucket.add("c", 1, "manual")
    world.bucket.add("c", 2, tag="before the upgrade")
    await world.settle(130)
    assert sorted(world.status(name)["turn"] for name in world.names()) == turns


async def test_another_mode_takes_away_what_was_published(world):
    for turn in range(3):
        world.bucket.add("c", turn)
    await world.settle(LATER)
    world.kube.edit(POLICIES, NS, "default", {"spec": {"publish": {"mode": "None"}}})
    world.enqueue(MODELS, NS, "m")
    await world.settle(5)
    assert world.names() == []
    assert len(world.bucket.snapshots) == 3


async def test_a_silent_engine_is_left_for_another_and_nothing_is_lost(world):
    await world.pod(ordinal=1)
    world.bucket.add("c", 1)
    await world.settle(LATER)
    for engine in world.engines.values():
        engine.answer = (500, None)
    await world.settle(600)
    assert len(world.names()) == 1
    world.engines["m-1"].answer = None
    world.bucket.add("c", 2)
    await world.settle(120)
    assert len(world.names()) == 2


async def test_an_engine_that_lies_can_take_nothing_away_but_the_view(world):
    """An empty listing is a view of an empty store: objects that users did not make go, bytes do not."""
    world.bucket.add("c", 1)
    world.engines["m-0"].live["mine"] = 1
    world.request("mine", "mine")
    await world.settle(LATER)
    world.engines["m-0"].raw = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"snapshots":[]'
    await world.settle(300)
    assert "mine" in world.names()
    assert len(world.names()) == 2


async def test_a_model_that_sleeps_keeps_its_view(world):
    world.bucket.add("c", 1)
    await world.settle(LATER)
    await world.lose_pod("m-0")
    await world.settle(600)
    assert len(world.names()) == 1
    world.kube.remove(MODELS, NS, "m")
    await world.settle(600)
    assert len(world.names()) == 1
