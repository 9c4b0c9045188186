"""The client's verbs over a store: what the server holds afterwards, what callers are told, what is retried."""

from __future__ import annotations

import copy
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from engram_operator.kube.client import Kube, Object, Response, fingerprint
from engram_operator.kube.errors import (
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    KubeError,
    NotFound,
    ServerFailed,
    Unavailable,
)
from engram_operator.kube.kinds import (
    EVENTS,
    MODELS,
    NAMESPACES,
    POD_MONITORS,
    PODS,
    SERVICES,
    SNAPSHOTS,
    STATEFULSETS,
    kind_of,
)
from tests.support.fake_kube import FakeKube

MODEL: Object = {
    "apiVersion": "engram.dev/v1alpha1",
    "kind": "EngramModel",
    "metadata": {"name": "tiny", "namespace": "default"},
    "spec": {"model": {"uri": "hf://org/tiny"}},
}
SERVICE: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "tiny", "namespace": "default", "labels": {"a": "1"}},
    "spec": {"selector": {"x": "y"}, "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}]},
}


def changed(obj: Object, **spec: Any) -> Object:
    obj = copy.deepcopy(obj)
    obj["spec"].update(spec)
    return obj


async def test_apply_makes_then_changes_then_leaves_alone() -> None:
    kube = FakeKube()
    made = await kube.apply(SERVICE)
    assert made["metadata"]["uid"]
    version = kube.store.version
    again = await kube.apply(SERVICE)
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert kube.store.version == version  # a write that changes nothing leaves no trace
    other = await kube.apply(changed(SERVICE, selector={"x": "z"}))
    assert other["spec"]["selector"] == {"x": "z"}


async def test_apply_takes_away_what_it_applied_before_and_leaves_what_others_set() -> None:
    kube = FakeKube()
    await kube.apply(SERVICE)
    kube.edit(SERVICES, "default", "tiny", {"metadata": {"labels": {"theirs": "stays"}}})
    without = copy.deepcopy(SERVICE)
    without["metadata"]["labels"] = {"b": "2"}
    without["spec"]["ports"] = [{"name": "other", "port": 9000, "protocol": "TCP"}]
    live = await kube.apply(without)
    assert live["metadata"]["labels"] == {"b": "2", "theirs": "stays"}
    assert [port["port"] for port in live["spec"]["ports"]] == [9000]


async def test_apply_repairs_an_edited_list_item_and_keeps_a_foreign_one() -> None:
    kube = FakeKube()
    pod_spec = {"containers": [{"name": "engine", "image": "a", "env": [{"name": "X", "value": "1"}]}]}
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "tiny", "namespace": "default"},
        "spec": {"replicas": 1, "template": {"spec": pod_spec}},
    }
    await kube.apply(stateful_set)
    live = kube.find(STATEFULSETS, "default", "tiny")
    assert live is not None
    containers = live["spec"]["template"]["spec"]["containers"]
    containers[0]["image"] = "edited"
    containers.append({"name": "sidecar", "image": "theirs"})
    kube.edit(STATEFULSETS, "default", "tiny", {"spec": live["spec"]})
    repaired = await kube.apply(stateful_set)
    found = {c["name"]: c["image"] for c in repaired["spec"]["template"]["spec"]["containers"]}
    assert found == {"engine": "a", "sidecar": "theirs"}


async def test_a_dry_run_shows_the_result_and_writes_nothing() -> None:
    kube = FakeKube()
    shown = await kube.apply(MODEL, dry_run=True)
    assert shown["spec"]["replicas"] == 1  # the schema's default
    assert kube.find(MODELS, "default", "tiny") is None


async def test_our_resources_are_checked_and_defaulted_by_their_schemas() -> None:
    kube = FakeKube()
    assert kube.put(copy.deepcopy(MODEL))["spec"]["replicas"] == 1
    with pytest.raises(Invalid, match="replicaz"):
        await kube.apply(changed({**MODEL, "metadata": {"name": "b", "namespace": "default"}}, replicaz=1))


async def test_status_is_written_apart_and_only_for_the_object_that_was_meant() -> None:
    kube = FakeKube()
    model = kube.put(copy.deepcopy(MODEL))
    uid, generation = model["metadata"]["uid"], model["metadata"]["generation"]
    live = await kube.apply_status(MODELS, "tiny", "default", {"phase": "Pending", "replicas": 1}, uid=uid)
    assert live["metadata"]["generation"] == generation
    live = await kube.apply_status(MODELS, "tiny", "default", {"phase": "Ready"}, uid=uid)
    assert live["status"] == {"phase": "Ready"}  # what is no longer applied goes
    with pytest.raises(Conflict):
        await kube.apply_status(MODELS, "tiny", "default", {"phase": "Ready"}, uid="another")
    kube.remove(MODELS, "default", "tiny")
    with pytest.raises(NotFound):
        await kube.apply_status(MODELS, "tiny", "default", {"phase": "Ready"}, uid=uid)


async def test_apply_of_a_spec_does_not_touch_the_status() -> None:
    kube = FakeKube()
    kube.put({**copy.deepcopy(MODEL), "status": {"phase": "Ready"}})
    await kube.apply({**copy.deepcopy(MODEL), "status": {"phase": "Failed"}})
    live = kube.find(MODELS, "default", "tiny")
    assert live is not None
    assert live["status"]["phase"] == "Ready"


async def test_create_answers_none_when_the_name_is_taken() -> None:
    kube = FakeKube()
    assert await kube.create(copy.deepcopy(SERVICE)) is not None
    assert await kube.create(copy.deepcopy(SERVICE)) is None


async def test_create_after_a_lost_answer_finds_its_own_object() -> None:
    kube = FakeKube(retries=True)
    kube.fail(0, "create", SERVICES, after=True)
    assert await kube.create(copy.deepcopy(SERVICE)) is None
    assert kube.find(SERVICES, "default", "tiny") is not None


async def test_delete_is_of_one_object_not_of_a_name() -> None:
    kube = FakeKube()
    made = await kube.apply(SERVICE)
    assert not await kube.delete(SERVICES, "tiny", "default", uid="another")
    assert kube.find(SERVICES, "default", "tiny") is not None
    assert await kube.delete(SERVICES, "tiny", "default", uid=made["metadata"]["uid"])
    assert not await kube.delete(SERVICES, "tiny", "default")


async def test_finalizers_hold_a_deleted_object_until_they_are_taken_off() -> None:
    kube = FakeKube()
    model = copy.deepcopy(MODEL)
    model["metadata"]["finalizers"] = ["engram.dev/drain"]
    kube.put(model)
    assert await kube.delete(MODELS, "tiny", "default")
    live = await kube.get(MODELS, "tiny", "default")
    assert live is not None
    assert live["metadata"]["deletionTimestamp"]
    stale = {"metadata": {"finalizers": [], "resourceVersion": "1"}}
    with pytest.raises(Conflict):
        await kube.merge_patch(MODELS, "tiny", "default", stale)
    patch = {"metadata": {"finalizers": [], "resourceVersion": live["metadata"]["resourceVersion"]}}
    await kube.merge_patch(MODELS, "tiny", "default", patch)
    assert await kube.get(MODELS, "tiny", "default") is None


async def test_owned_objects_go_with_their_owner() -> None:
    kube = FakeKube()
    model = kube.put(copy.deepcopy(MODEL))
    service = copy.deepcopy(SERVICE)
    reference = {"apiVersion": "engram.dev/v1alpha1", "kind": "EngramModel", "name": "tiny"}
    service["metadata"]["ownerReferences"] = [{**reference, "uid": model["metadata"]["uid"]}]
    await kube.apply(service)
    assert kube.cache.owned(SERVICES, "default", model["metadata"]["uid"])
    kube.remove(MODELS, "default", "tiny")
    assert kube.all(SERVICES) == []
    assert kube.cache.list(SERVICES) == []
    await kube.apply(service)  # by one who has not heard yet
    assert kube.all(SERVICES) == []
    assert kube.cache.list(SERVICES) == []


async def test_a_terminating_namespace_takes_nothing_new() -> None:
    kube = FakeKube()
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "finalizers": ["kubernetes"]}}
    kube.put(space)
    kube.remove(NAMESPACES, "", "default")
    with pytest.raises(Forbidden, match="being terminated"):
        await kube.create(copy.deepcopy(SERVICE))


async def test_lists_come_in_pages_as_whole_objects() -> None:
    kube = FakeKube()
    kube.store.schemas = None
    for number in range(1203):
        kube.put(
            {**MODEL, "kind": "Snapshot", "metadata": {"name": f"s-{number:04}", "labels": {"odd": str(number % 2)}}}
        )
    found = await kube.list(SNAPSHOTS, "default")
    assert [obj["metadata"]["name"] for obj in found] == [f"s-{n:04}" for n in range(1203)]
    assert {kind_of(obj) for obj in found} == {SNAPSHOTS}
    assert len(await kube.list(SNAPSHOTS, labels="odd=1")) == 601


async def test_a_list_whose_pages_expired_begins_again() -> None:
    class Forgetful:
        calls: list[str | None]

        def __init__(self) -> None:
            self.calls = []

        async def send(self, method: str, path: str, query: Any, body: Any, *rest: str) -> Response:
            token = query.get("continue")
            self.calls.append(token)
            if token == "old":
                return Response(410, {"reason": "Expired"})
            more = {"continue": "old" if len(self.calls) == 1 else ""}
            return Response(200, {"metadata": more, "items": [{"metadata": {"name": f"p{len(self.calls)}"}}]})

        async def close(self) -> None:
            return None

    transport = Forgetful()
    found = await Kube(transport).list(PODS)
    assert [pod["metadata"]["name"] for pod in found] == ["p3"]
    assert transport.calls == [None, "old", None]


async def test_apis_that_the_cluster_lacks_are_known_before_they_are_used() -> None:
    kube = FakeKube()
    assert await kube.serves(SERVICES)
    assert not await kube.serves(POD_MONITORS)
    asked = len(kube.store.requests)
    kube.store.served.add(POD_MONITORS)
    assert not await kube.serves(POD_MONITORS)  # remembered for a minute
    assert len(kube.store.requests) == asked
    later = datetime.now(UTC) + timedelta(seconds=61)
    kube.store.clock = lambda: later
    assert await kube.serves(POD_MONITORS)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 0])
async def test_a_server_that_is_away_or_busy_is_asked_again(status: int) -> None:
    kube = FakeKube(retries=True)
    kube.failed_s = kube.deadline_s
    kube.fail(status, times=4)
    assert (await kube.apply(SERVICE))["metadata"]["uid"]


async def test_a_server_that_fails_over_one_object_keeps_nobody_for_long() -> None:
    kube = FakeKube(retries=True)
    assert (kube.failed_s, kube.deadline_s) == (1.0, 30.0)
    kube.failed_s = 0.05
    kube.fail(500, times=None, message="range is full")
    began = time.monotonic()
    with pytest.raises(ServerFailed, match="range is full"):
        await kube.apply(SERVICE)
    assert time.monotonic() - began < kube.deadline_s / 2
    kube = FakeKube(retries=True)
    kube.fail(500, times=1)
    assert (await kube.apply(SERVICE))["metadata"]["uid"], "one failure is not told"


@pytest.mark.parametrize(
    ("status", "error"), [(400, Invalid), (403, Forbidden), (409, Conflict), (410, Expired), (422, Invalid)]
)
async def test_an_answer_about_the_object_is_not_asked_for_twice(status: int, error: type[KubeError]) -> None:
    kube = FakeKube(retries=True)
    kube.fail(status, times=2, message="because")
    with pytest.raises(error, match="because"):
        await kube.apply(SERVICE)
    assert len(kube.writes()) == 1


async def test_the_deadline_ends_the_tries() -> None:
    kube = FakeKube(retries=True)
    kube.deadline_s = 0.05
    kube.fail(503, times=None)
    with pytest.raises(Unavailable):
        await kube.get(SERVICES, "tiny", "default")


async def test_retry_after_is_honoured() -> None:
    class Busy:
        first = True

        async def send(self, *args: Any) -> Response:
            if self.first:
                self.first = False
                return Response(429, {}, retry_after_s=7.0)
            return Response(200, {})

        async def close(self) -> None:
            return None

    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    await Kube(Busy(), sleep=sleep).get(SERVICES, "tiny", "default")
    assert waited == [7.0]


async def test_the_same_event_is_said_once_in_ten_minutes_and_then_with_its_count() -> None:
    kube = FakeKube()
    start = now = datetime(2026, 1, 1, tzinfo=UTC)
    kube.store.clock = lambda: now
    model = kube.put(copy.deepcopy(MODEL))
    for _ in range(3):
        await kube.event(model, "BucketDenied", "access denied", type="Warning")
    await kube.event(model, "BucketDenied", "another message", type="Warning")
    assert [reason for _, reason, _ in kube.events()] == ["BucketDenied", "BucketDenied"]
    now = start + timedelta(minutes=11)
    await kube.event(model, "BucketDenied", "access denied", type="Warning")
    last = kube.all(EVENTS)
    assert [event.get("series", {}).get("count") for event in last].count(3) == 1
    assert {event["regarding"]["uid"] for event in last} == {model["metadata"]["uid"]}


async def test_an_event_that_cannot_be_written_stops_nothing() -> None:
    kube = FakeKube()
    model = kube.put(copy.deepcopy(MODEL))
    kube.fail(403, "create", EVENTS)
    await kube.event(model, "Draining", "x")
    await kube.event(model, "Drained", "ü" * 4000)
    ((_, reason, note),) = kube.events()
    assert reason == "Drained"
    assert len(note.encode()) <= 1024


async def test_writes_are_told_by_kind_and_verb() -> None:
    kube = FakeKube()
    told: list[tuple[str, str]] = []
    kube.wrote = lambda kind, verb: told.append((kind.plural, verb))
    await kube.apply(SERVICE)
    await kube.apply(SERVICE, dry_run=True)
    await kube.delete(SERVICES, "tiny", "default")
    await kube.delete(SERVICES, "tiny", "default")
    assert told == [("services", "apply"), ("services", "delete")]


def test_a_fingerprint_depends_on_content_and_not_on_order() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"b": [2, 1]}) != fingerprint({"b": [1, 2]})


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="v1 ConfigMap"):
        kind_of({"apiVersion": "v1", "kind": "ConfigMap"})
