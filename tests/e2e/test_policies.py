"""What a SnapshotPolicy does to what is kept: changed while models serve, swept, refused by the bucket, outlived."""

from __future__ import annotations

import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e import resources
from tests.e2e.caller import PORT, Caller
from tests.e2e.cluster.client import Client, CommandError, Object, condition, names
from tests.e2e.conftest import Images, ObjectStore, new_namespace

MODEL = "garden"
STORE, STORE_PORT = "store", 9000
READY_SECONDS = 240
SWEEP_SECONDS = 60  # the shortest that a policy may ask for
GRACE_SECONDS = 2  # files this young are not swept: an hour, if nothing is said
TURNS = ("Plant the beans by the wall.", "Water them on Monday.", "Pick them in August.")


@dataclass
class Garden:
    """One conversation of three turns with a tiny model, kept in a bucket."""

    kube: Client
    namespace: str
    bucket: str
    store: ObjectStore
    caller: Caller

    def chat(self, conversation: str, texts: tuple[str, ...]) -> None:
        messages: list[dict[str, str]] = []
        for text in texts:
            messages.append({"role": "user", "content": text})
            body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
            headers = {"x-engram-conversation-id": conversation}
            answer = self.caller.ask(f"http://{MODEL}:{PORT}/v1/chat/completions", body, headers=headers)
            assert answer.status == 200, answer.text
            messages.append(answer.json["choices"][0]["message"])

    def shown(self) -> list[Object]:
        """Snapshot objects, by turn."""
        listed = self.kube.objects(f"/apis/engram.dev/v1alpha1/namespaces/{self.namespace}/snapshots")
        return sorted(listed, key=lambda item: (item.get("status") or {}).get("turn", 0))

    def turns(self) -> list[int]:
        return [item["status"]["turn"] for item in self.shown() if (item.get("status") or {}).get("readyToUse")]

    def stored(self) -> list[str]:
        """Keys of snapshots in the bucket."""
        return [key for key in self.store.keys(self.bucket) if "/snap/" in key]

    def until_turns(self, *turns: int, seconds: float = 60) -> None:
        try:
            self.until(f"Snapshots of turns {turns}", lambda: self.turns() == list(turns), seconds)
        except AssertionError as error:
            shown = self.kube.kubectl("get", "snapshots", "-o", "wide", namespace=self.namespace)
            raise AssertionError(f"{error}\n{shown}") from error

    def pods(self) -> dict[str, str]:
        """Name and uid of the model's."""
        found = self.kube.pods(self.namespace, f"app.kubernetes.io/instance={MODEL}")
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}

    def change_policy(self, **spec: Any) -> None:
        patch = json.dumps({"spec": spec})
        self.kube.kubectl("patch", "snapshotpolicy", "default", "--type=merge", "-p", patch, namespace=self.namespace)

    def change_retention(self, **retention: Any) -> None:
        """And waits for the pod that knows of it: it is a flag of the engine."""
        before = self.pods()

        def replaced() -> bool:
            now = self.pods()
            return set(now) == set(before) and not set(now.values()) & set(before.values())

        self.change_policy(retention=retention)
        self.until("another pod", replaced, READY_SECONDS)
        self.kube.wait(f"pod/{MODEL}-0", "condition=Ready", self.namespace, READY_SECONDS)
        self.caller.wait_for(MODEL, READY_SECONDS)

    def model(self, kind: str) -> Object:
        return condition(self.kube.custom("engrammodels", self.namespace, MODEL), kind)

    def policy(self) -> Object:
        return (self.kube.custom("snapshotpolicies", self.namespace, "default") or {}).get("status") or {}

    def until(self, what: str, check: Callable[[], Any], seconds: float = 60) -> Any:
        return self.kube.until(what, check, seconds)


def store_service(store: ObjectStore) -> list[Object]:
    """An address for the object store inside the namespace, which can be made to lead nowhere."""
    url = urllib.parse.urlsplit(store.server.url)
    if url.scheme != "http":
        pytest.skip("needs an object store over http, to stand in front of it")
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": STORE}}
    ends = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": STORE, "labels": {"kubernetes.io/service-name": STORE}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [socket.gethostbyname(url.hostname or "")]}],
        "ports": [{"port": url.port or 80}],
    }
    return [{**service, "spec": {"ports": [{"port": STORE_PORT}]}}, ends]


@pytest.fixture(scope="module")
def garden(kube: Client, images: Images, operator: str, object_store: ObjectStore, tiny_model: str) -> Iterator[Garden]:
    with new_namespace(kube, "policies") as namespace:
        bucket = object_store.bucket()
        kube.apply(*store_service(object_store), namespace=namespace)
        # By number: Ceph's gateway takes another name than its own for that of a bucket.
        address = (kube.read(f"/api/v1/namespaces/{namespace}/services/{STORE}") or {})["spec"]["clusterIP"]
        storage = {**object_store.storage(bucket), "endpointURL": f"http://{address}:{STORE_PORT}"}
        retention = {"keepLast": 5, "gcIntervalSeconds": SWEEP_SECONDS}
        policy = resources.policy(object_store, bucket, storage=storage, retention=retention)
        engine = {**resources.ENGINE, "args": ["--gc-grace-seconds", str(GRACE_SECONDS)]}
        model = resources.model(MODEL, tiny_model, engine=engine)
        kube.apply(object_store.secret(), policy, model, namespace=namespace)
        caller = Caller.start(kube, images.engine, namespace)
        caller.wait_for(MODEL, READY_SECONDS)
        made = Garden(kube, namespace, bucket, object_store, caller)
        made.chat("beans", TURNS)
        yield made


def test_each_turn_has_an_object_while_the_policy_keeps_it(garden: Garden) -> None:
    garden.until_turns(1, 2, 3)
    ids = [item["status"]["snapshotID"] for item in garden.shown()]
    assert all(any(snapshot_id in key for key in garden.stored()) for snapshot_id in ids)


def test_how_many_are_shown_changes_without_a_restart(garden: Garden) -> None:
    before, stored = garden.pods(), garden.stored()
    garden.change_policy(publish={"limit": 1})
    garden.until_turns(3)
    assert garden.stored() == stored
    garden.change_policy(publish={"limit": 10})
    garden.until_turns(1, 2, 3)
    assert garden.pods() == before


def test_a_changed_retention_reaches_the_engine_and_old_turns_go_with_their_bytes(garden: Garden) -> None:
    stored = garden.stored()
    old = [entry["snapshotID"] for item in garden.shown()[:2] for entry in item["status"]["boundaries"]]
    kept = [entry["snapshotID"] for entry in garden.shown()[2]["status"]["boundaries"]]
    garden.change_retention(keepLast=1)
    garden.until_turns(3, seconds=3 * SWEEP_SECONDS)

    after = garden.stored()
    assert not [key for key in after if any(snapshot_id in key for snapshot_id in old)]
    assert all(any(snapshot_id in key for key in after) for snapshot_id in kept)
    assert len(after) < len(stored)
    garden.until("the policy tells of a sweep", lambda: garden.policy().get("lastGcTime"), 2 * SWEEP_SECONDS)


def test_a_conversation_beyond_the_limit_goes_with_all_that_no_other_shares(garden: Garden) -> None:
    """Snapshots at the next sweep, KV files that nothing names any more at the second after."""
    before = set(garden.store.keys(garden.bucket))
    assert len(kv_files(before)) > 1
    garden.change_retention(maxConversations=1, keepLast=5)
    garden.chat("peas", ("Sow the peas in rows.",))

    def gone() -> bool:
        left = before & set(garden.store.keys(garden.bucket))
        # Its first file may stay: both conversations begin with the same tokens of the chat template.
        return not [key for key in left if "/snap/" in key] and len(kv_files(left)) <= 1

    garden.until("nothing of its own is stored of the older conversation", gone, 6 * SWEEP_SECONDS)
    shown = garden.until("its objects went too", lambda: len(garden.shown()) == 1 and garden.shown())
    assert shown[0]["status"]["turn"] == 1


def kv_files(keys: set[str]) -> list[str]:
    return [key for key in keys if "/kv/" in key]


def test_a_bucket_that_refuses_is_told_and_chats_go_on(garden: Garden) -> None:
    client = garden.store.server.client()
    actions = ["s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket"]
    where = [f"arn:aws:s3:::{garden.bucket}", f"arn:aws:s3:::{garden.bucket}/*"]
    rule = {"Effect": "Deny", "Principal": {"AWS": ["*"]}, "Action": actions, "Resource": where}
    document = json.dumps({"Version": "2012-10-17", "Statement": [rule]})
    client.put_bucket_policy(Bucket=garden.bucket, Policy=document)
    try:
        garden.chat("tomatoes", ("Do they need a stake?",))

        def refused() -> Object | None:
            said = garden.model("SnapshotsReady")
            return said if said.get("status") == "False" else None

        said = garden.until("SnapshotsReady is False", refused, 120)
        assert said["reason"] == "AccessDenied"
        assert "AccessDenied" in said["message"]
        garden.chat("tomatoes", ("Do they need a stake?",))
        assert garden.model("Ready")["status"] == "True"

        def told() -> bool:
            found = garden.policy()["conditions"][0]
            return bool(found["status"] == "False" and found["reason"] == "AccessDenied")

        garden.until("the policy says it too", told)
    finally:
        client.delete_bucket_policy(Bucket=garden.bucket)
    garden.until("SnapshotsReady is True again", lambda: garden.model("SnapshotsReady")["status"] == "True", 120)
    garden.chat("cucumbers", TURNS)


def test_without_the_model_a_job_deletes_the_bytes(garden: Garden) -> None:
    garden.until("the newest conversation alone is kept", lambda: garden.turns()[-3:] == [1, 2, 3], 4 * SWEEP_SECONDS)
    snapshot = garden.shown()[-1]
    name, stored = snapshot["metadata"]["name"], [e["snapshotID"] for e in snapshot["status"]["boundaries"]]
    garden.kube.kubectl("delete", "engrammodel", MODEL, "--timeout=90s", namespace=garden.namespace)

    garden.kube.kubectl("delete", "snapshot", name, "--timeout=90s", namespace=garden.namespace)

    assert not [key for key in garden.stored() if any(snapshot_id in key for snapshot_id in stored)]
    jobs = garden.kube.objects(f"/apis/batch/v1/namespaces/{garden.namespace}/jobs")
    assert any(name.startswith("engram-erase-") for name in names(jobs))


def test_without_model_and_store_the_object_says_why_it_stays_and_can_be_given_up(garden: Garden) -> None:
    name = garden.shown()[-1]["metadata"]["name"]
    garden.kube.kubectl("delete", "endpointslice", STORE, namespace=garden.namespace)
    garden.kube.kubectl("delete", "snapshot", name, "--wait=false", namespace=garden.namespace)

    def told() -> Object | None:
        found = condition(garden.kube.custom("snapshots", garden.namespace, name), "DataDeleted")
        return found if found.get("reason") == "Unreachable" else None

    said = garden.until("the reason why the bytes are not deleted", told, 120)
    assert said["status"] == "False"
    with pytest.raises(CommandError, match="timed out"):
        garden.kube.kubectl("wait", "--for=delete", f"snapshot/{name}", "--timeout=5s", namespace=garden.namespace)
    annotation = "engram.dev/abandon-data=true"
    garden.kube.kubectl("annotate", "snapshot", name, annotation, namespace=garden.namespace)
    garden.kube.kubectl("wait", "--for=delete", f"snapshot/{name}", "--timeout=20s", namespace=garden.namespace)


def test_a_namespace_goes_although_its_store_is_gone(garden: Garden) -> None:
    assert garden.shown()
    began = time.monotonic()
    garden.kube.kubectl("delete", "namespace", garden.namespace, "--timeout=60s")
    assert time.monotonic() - began < 60
