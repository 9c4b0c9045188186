"""Snapshots by kubectl: one taken now and pinned, one that is deleted with its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e import resources
from tests.e2e.caller import PORT, Caller
from tests.e2e.cluster.client import Client, Object
from tests.e2e.conftest import Images, ObjectStore, new_namespace

MODEL = "notes"
CONVERSATION = "a-conversation-of-mine"
READY_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Kept:
    namespace: str
    bucket: str
    caller: Caller


@pytest.fixture(scope="module")
def kept(kube: Client, images: Images, operator: str, object_store: ObjectStore, tiny_model: str) -> Iterator[Kept]:
    """A tiny model whose turns are in a bucket, and one conversation of two turns."""
    with new_namespace(kube, "kept") as namespace:
        bucket = object_store.bucket()
        policy = resources.policy(object_store, bucket, publish={"mode": "Requested"})
        kube.apply(object_store.secret(), policy, resources.model(MODEL, tiny_model), namespace=namespace)
        caller = Caller.start(kube, images.engine, namespace)
        caller.wait_for(MODEL, READY_SECONDS)
        answer = caller.chat(MODEL, "Please keep what I say about bees.", conversation=CONVERSATION)
        assert answer.status == 200, answer.text
        yield Kept(namespace, bucket, caller)


def ready(kube: Client, namespace: str, name: str) -> Object | None:
    found = kube.custom("snapshots", namespace, name)
    return found if found and (found.get("status") or {}).get("readyToUse") else None


def test_a_snapshot_is_taken_when_one_asks(kube: Client, kept: Kept, object_store: ObjectStore) -> None:
    kube.apply(resources.snapshot("now", MODEL, CONVERSATION, pinned=True), namespace=kept.namespace)
    status = kube.until("a Snapshot that is ready", lambda: ready(kube, kept.namespace, "now"), 60)["status"]

    assert status["phase"] == "Ready"
    assert status["tokens"] > 0
    assert status["uri"].startswith(f"s3://{kept.bucket}/")
    assert any(status["snapshotID"] in key for key in object_store.keys(kept.bucket))
    assert CONVERSATION not in kube.kubectl("get", "snapshots", "-o", "wide", namespace=kept.namespace)


def test_it_is_pinned_until_one_says_otherwise(kube: Client, kept: Kept) -> None:
    snapshot_id = kube.custom("snapshots", kept.namespace, "now")["status"]["snapshotID"]  # type: ignore[index]

    inside = Caller(kube, kept.namespace, f"{MODEL}-0")

    def pinned() -> list[bool]:
        answer = inside.ask(f"http://127.0.0.1:{PORT}/v1/snapshots?conversation_id={CONVERSATION}")
        assert answer.status == 200, answer.text
        return [entry["pinned"] for entry in answer.json["data"] if entry["id"] == snapshot_id]

    assert pinned() == [True]
    patch = '{"spec":{"pinned":false}}'
    kube.kubectl("patch", "snapshot", "now", "--type=merge", "-p", patch, namespace=kept.namespace)
    kube.until("the snapshot is not pinned any more", lambda: pinned() == [False], 60)


def test_deleting_the_object_deletes_the_bytes(kube: Client, kept: Kept, object_store: ObjectStore) -> None:
    status = kube.custom("snapshots", kept.namespace, "now")["status"]  # type: ignore[index]
    stored = [entry["snapshotID"] for entry in status.get("boundaries", [])] or [status["snapshotID"]]
    before = object_store.keys(kept.bucket)

    kube.kubectl("delete", "snapshot", "now", "--timeout=90s", namespace=kept.namespace)

    after = object_store.keys(kept.bucket)
    assert not [key for key in after if any(snapshot_id in key for snapshot_id in stored)]
    assert len(after) < len(before)


def test_one_that_an_application_has_deleted_is_said_to_be_lost(kube: Client, kept: Kept) -> None:
    conversation = "another-conversation"
    assert kept.caller.chat(MODEL, "Keep this too.", conversation=conversation).status == 200
    kube.apply(resources.snapshot("other", MODEL, conversation), namespace=kept.namespace)
    status = kube.until("a Snapshot that is ready", lambda: ready(kube, kept.namespace, "other"), 60)["status"]
    inside = Caller(kube, kept.namespace, f"{MODEL}-0")
    for entry in status.get("boundaries") or [status]:
        url = f"http://127.0.0.1:{PORT}/v1/snapshots/{entry['snapshotID']}"
        assert inside.ask(url, method="DELETE").status == 200
    patch = '{"spec":{"pinned":true}}'
    kube.kubectl("patch", "snapshot", "other", "--type=merge", "-p", patch, namespace=kept.namespace)

    def lost() -> Object | None:
        found = (kube.custom("snapshots", kept.namespace, "other") or {}).get("status") or {}
        return found if found.get("phase") == "Failed" else None

    said = kube.until("the object says that its bytes are gone", lost, 60)
    assert said["readyToUse"] is False
    assert [(entry["type"], entry["reason"]) for entry in said["conditions"]] == [("Ready", "DataLost")]
    kube.kubectl("delete", "snapshot", "other", "--timeout=60s", namespace=kept.namespace)
