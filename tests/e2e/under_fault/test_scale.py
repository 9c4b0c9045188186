"""Many models and Snapshots at once: how long the operator takes to look at all, what it needs, and that it is still.

ENGRAM_E2E_SCALE=full makes it 500 models and 5,000 Snapshots; without it a fifth of that.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.e2e import resources
from tests.e2e.cluster.audit import AuditLog, service_account
from tests.e2e.cluster.client import Client, Object
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.conftest import TIMINGS, new_namespace

MODELS, SNAPSHOTS = (500, 5000) if os.environ.get("ENGRAM_E2E_SCALE") == "full" else (100, 1000)
MAKERS = 4  # kubectl processes side by side: each may ask 50 times a second
OPERATOR_LABELS = "app.kubernetes.io/component=operator"
QUIET_SECONDS = 5
# Bounds, for the objects of either size, on two cores that also run the cluster.
SECONDS_PER_WRITE = 0.05
START_SECONDS = 60
CHANGE_SECONDS = 10
MEMORY_BYTES = 300e6
WRITES_PER_MODEL, WRITES_PER_SNAPSHOT = 10, 3


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator pod and what it says of itself."""

    kube: Client
    namespace: str

    def pod(self) -> Object:
        def running() -> Object | None:
            found = self.kube.pods(self.namespace, OPERATOR_LABELS)
            return found[0] if len(found) == 1 and "deletionTimestamp" not in found[0]["metadata"] else None

        return self.kube.until("one operator", running, START_SECONDS)

    def metrics(self) -> str:
        pod = self.pod()["metadata"]["name"]
        return self.kube.kubectl("get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{pod}:8080/proxy/metrics")

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.metrics(), re.MULTILINE)
        return sum(float(value) for value in values)

    def written(self) -> float:
        """Writes, those of its lease left out: they never end."""
        values = re.findall(r'^engram_operator_writes_total{kind="(\w+)",.*} (\S+)$', self.metrics(), re.MULTILINE)
        return sum(float(value) for kind, value in values if kind != "Lease")

    def quiet(self, since: float, seconds: float) -> float:
        """Waits until nothing is due and nothing was written for a while; seconds from `since` to the last write."""
        written, last = -1.0, time.monotonic()
        until = time.monotonic() + seconds
        while time.monotonic() - last < QUIET_SECONDS or self.metric("engram_operator_queue_depth"):
            assert time.monotonic() < until, f"not quiet within {seconds:.0f} s"
            if (now := self.written()) != written:
                written, last = now, time.monotonic()
            time.sleep(1)
        return last - since


@pytest.fixture(scope="module")
def many(cluster: Cluster) -> Iterator[str]:
    with new_namespace(cluster, "many") as name:
        yield name


def create(kube: Client, objects: Sequence[Object], namespace: str) -> None:
    """All of them, by several makers."""
    errors: list[Exception] = []

    def make(part: Sequence[Object]) -> None:
        try:
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(part)})
            kube.kubectl("create", "-f", "-", namespace=namespace, stdin=text, timeout=600)
        except Exception as error:
            errors.append(error)

    makers = [threading.Thread(target=make, args=(objects[index::MAKERS],)) for index in range(MAKERS)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert errors == []


def objects(uri: str) -> list[Object]:
    """Suspended models, and Snapshots of them that wait for an engine."""
    models = [resources.model(f"model-{number}", uri, suspend=True) for number in range(MODELS)]
    snapshots = [
        resources.snapshot(f"snapshot-{number}", f"model-{number % MODELS}", f"conversation-{number}")
        for number in range(SNAPSHOTS)
    ]
    return models + snapshots


def unfinished(kube: Client, namespace: str) -> list[str]:
    """Objects that the operator has not said the last word about."""
    found = []
    for plural, phase in (("engrammodels", "Suspended"), ("snapshots", "Pending")):
        items = kube.objects(f"/apis/engram.dev/v1alpha1/namespaces/{namespace}/{plural}")
        assert len(items) == (MODELS if plural == "engrammodels" else SNAPSHOTS)
        for item in items:
            status, metadata = item.get("status") or {}, item["metadata"]
            if status.get("phase") != phase or status.get("observedGeneration") != metadata["generation"]:
                found.append(metadata["name"])
    return found


@pytest.mark.timeout(1800)
def test_everything_is_looked_at_and_then_nothing_is_written(
    cluster: Cluster,
    audit: AuditLog,
    operator: str,
    many: str,
    tiny_model: str,
    request: pytest.FixtureRequest,
) -> None:
    timings = request.config.stash[TIMINGS]
    running = Operator(cluster, operator)
    user = service_account(operator, running.pod()["spec"]["serviceAccountName"])
    position = audit.position()
    began = time.monotonic()
    create(cluster, objects(tiny_model), many)
    created = time.monotonic() - began
    writes = MODELS * WRITES_PER_MODEL + SNAPSHOTS * WRITES_PER_SNAPSHOT
    took = running.quiet(began, created + writes * SECONDS_PER_WRITE)
    made = len([entry for entry in audit.writes(position, user) if entry.namespace == many])
    looks, seconds = (running.metric(f"engram_operator_reconcile_seconds_{part}") for part in ("count", "sum"))
    size = f"{MODELS} models, {SNAPSHOTS} Snapshots"
    timings[f"{size}: created"], timings[f"{size}: quiet"] = created, took
    timings[f"{size}: writes of the operator (number)"] = made
    timings[f"{size}: a look on average"] = seconds / looks
    timings[f"{size}: operator's memory, MB"] = running.metric("process_resident_memory_bytes") / 1e6

    assert unfinished(cluster, many) == []
    assert made <= writes
    assert running.metric("process_resident_memory_bytes") < MEMORY_BYTES


def test_a_new_operator_lists_all_and_writes_nothing(
    cluster: Cluster, audit: AuditLog, operator: str, many: str, request: pytest.FixtureRequest
) -> None:
    before = Operator(cluster, operator).pod()
    user = service_account(operator, before["spec"]["serviceAccountName"])
    cluster.kubectl("delete", "pod", before["metadata"]["name"], "--wait=false", namespace=operator)
    position, began = audit.position(), time.monotonic()
    running = Operator(cluster, operator)

    def listed() -> bool:
        new = running.pod()
        ready = [entry for entry in new.get("status", {}).get("conditions", []) if entry["type"] == "Ready"]
        other = new["metadata"]["uid"] != before["metadata"]["uid"]
        return other and bool(ready) and ready[0]["status"] == "True"

    cluster.until("the new operator has listed everything", listed, START_SECONDS)
    timings = request.config.stash[TIMINGS]
    timings["new operator: ready with all of it listed"] = time.monotonic() - began
    running.quiet(began, MODELS + SNAPSHOTS)
    timings["new operator's memory, MB"] = running.metric("process_resident_memory_bytes") / 1e6
    assert [entry for entry in audit.writes(position, user) if entry.namespace == many] == []
    assert running.metric("process_resident_memory_bytes") < MEMORY_BYTES


def test_one_change_among_many_is_acted_on_at_once(
    cluster: Cluster, operator: str, many: str, request: pytest.FixtureRequest
) -> None:
    name = f"model-{MODELS // 2}"
    patch = json.dumps({"spec": {"networkPolicy": {"enabled": True}}})
    began = time.monotonic()
    cluster.kubectl("patch", "engrammodel", name, "--type=merge", "-p", patch, namespace=many)

    def seen() -> bool:
        live = cluster.custom("engrammodels", many, name) or {}
        return bool((live.get("status") or {}).get("observedGeneration") == live["metadata"]["generation"])

    cluster.until("the change is acted on", seen, CHANGE_SECONDS)
    request.config.stash[TIMINGS]["one change among all"] = time.monotonic() - began
    assert cluster.read(f"/apis/networking.k8s.io/v1/namespaces/{many}/networkpolicies/{name}") is not None
