"""The first hour of a user: helm install, apply, Ready, a chat, a look at what is kept, a pod that dies meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.application import Application
from tests.e2e.cluster.client import Client
from tests.e2e.conftest import Images, ObjectStore, new_namespace
from tests.e2e.resources import ENGINE, model, policy

GOLDEN = Path(__file__).parent / "golden" / "kubectl_get.txt"
MODEL = "chat"
READY_SECONDS = 600
# Long enough that computing it again would be seen in the count.
INTRODUCTION = (
    "My name is Ada and I keep bees behind my house. Every spring I look at each hive, count the frames with brood, "
    "note the weather, and write down how much honey was left after the winter. Last year the third hive was the "
    "strongest: it had filled nine frames by the end of April, and I took thirty kilograms of honey from it in July. "
    "Please answer in one short sentence. What do I keep behind my house?"
)
TURN_OVERHEAD = 48  # tokens of a short question, the chat template around it, and the last tokens of a snapshot's block


@dataclass
class Served:
    """The model in its namespace, and one conversation with it."""

    namespace: str
    application: Application
    bucket: str
    history: list[dict[str, str]] = field(default_factory=list)


@pytest.fixture(scope="module")
def served(kube: Client, images: Images, operator: str, object_store: ObjectStore, real_model: str) -> Iterator[Served]:
    """Two replicas of a model with real weights, their turns kept in a bucket."""
    with new_namespace(kube, "first-model") as namespace:
        bucket = object_store.bucket()
        chat = model(
            MODEL,
            real_model,
            replicas=2,
            engine={**ENGINE, "maxModelLen": 2048},
            resources={"requests": {"cpu": "100m", "memory": "1Gi"}},
            cache={"type": "EmptyDir", "size": "4Gi"},
            snapshots={"hostMemory": "256Mi", "disk": "1Gi"},
        )
        kube.apply(object_store.secret(), policy(object_store, bucket), chat, namespace=namespace)
        application = Application(kube, images.engine, namespace)
        kube.wait(f"engrammodel/{MODEL}", "condition=Ready", namespace, READY_SECONDS)
        yield Served(namespace, application, bucket)


def test_an_application_chats_and_the_second_turn_computes_only_what_is_new(served: Served) -> None:
    first, second = served.application.say(
        MODEL, INTRODUCTION, "How many kilograms of honey was it?", history=served.history
    )
    assert first.engram["restored_tokens"] == 0
    assert first.prompt_tokens > 100
    assert second.engram["restored_tokens"] >= first.prompt_tokens - TURN_OVERHEAD
    assert second.engram["prefilled_tokens"] + second.engram["restored_tokens"] == second.prompt_tokens
    assert second.engram["prefilled_tokens"] <= TURN_OVERHEAD + 24  # and the first answer at most
    assert second.engram["snapshot_id"]


def test_kubectl_shows_what_is_served_and_kept(kube: Client, served: Served, object_store: ObjectStore) -> None:
    def kept() -> list[str] | None:
        listed = kube.objects(f"/apis/engram.dev/v1alpha1/namespaces/{served.namespace}/snapshots")
        done = [item for item in listed if item.get("status", {}).get("readyToUse")]
        return [item["metadata"]["name"] for item in done] or None

    kube.until("a Snapshot object", kept, 60)
    assert object_store.keys(served.bucket)

    def shown() -> str | None:
        text = kube.kubectl("get", "engrammodels,snapshotpolicies,snapshots", namespace=served.namespace)
        masked = mask(text)
        return masked if masked == GOLDEN.read_text() else None

    try:
        kube.until("kubectl get as in the golden text", shown, 120)
    except AssertionError:
        text = kube.kubectl("get", "engrammodels,snapshotpolicies,snapshots", namespace=served.namespace)
        assert mask(text) == GOLDEN.read_text()


def test_a_deleted_pod_costs_the_conversation_nothing_but_the_new_tokens(kube: Client, served: Served) -> None:
    (before,) = served.application.say(MODEL, "Which hive was the strongest?", history=served.history)
    replica = before.engram["replica"]
    kube.kubectl("delete", "pod", replica, "--wait=false", namespace=served.namespace)

    (after,) = served.application.say(MODEL, "And in which month did I take the honey?", history=served.history)

    assert after.engram["replica"] != replica
    assert not after.engram.get("restore_failed")
    assert after.engram["restored_tokens"] >= before.prompt_tokens - TURN_OVERHEAD
    assert after.engram["prefilled_tokens"] + after.engram["restored_tokens"] == after.prompt_tokens
    assert after.engram["prefilled_tokens"] <= TURN_OVERHEAD + 24
    kube.wait(f"engrammodel/{MODEL}", "jsonpath={.status.readyReplicas}=2", served.namespace, READY_SECONDS)


def mask(text: str) -> str:
    """What differs from run to run, replaced: ages, hashes, counts of tokens, sizes; columns by three spaces."""
    text = re.sub(r"\b(\d+[dhms])+\b", "AGE", text)
    text = re.sub(r"\bengram-[0-9a-f]{12}\b", "BUCKET", text)
    text = re.sub(r"\b[0-9a-f]{10}\b", "HASH", text)
    text = re.sub(r"\b\d+(\.\d+)?[KMG]i\b", "SIZE", text)
    text = re.sub(r"\b\d{2,}\b", "TOKENS", text)
    lines = (re.sub(r" {2,}", "   ", line).rstrip() for line in text.splitlines())
    return "\n".join(lines) + "\n"
