"""The API server dies, forgets, or cannot be reached: models serve on, and the operator finds what it missed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.caller import load_from_here
from tests.e2e.cluster.audit import AuditLog, service_account
from tests.e2e.cluster.client import Object
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.control_plane import ETCD
from tests.e2e.conftest import Images, install_operator
from tests.e2e.under_fault.children import children
from tests.e2e.under_fault.conftest import MODEL, Served

OPERATOR_LABELS = "app.kubernetes.io/component=operator"
API_SERVER = "kube-apiserver"
NOTICED_SECONDS = 30
SEVERED_SECONDS = 6
PATIENCE = (90, 80, 2)
ANSWERS_SECONDS = 60
GONE = 410
# Forget every revision before this one, as etcd's regular compaction does; prints that revision.
COMPACT = """
import json, sys, urllib.request
def ask(path, body):
    request = urllib.request.Request(sys.argv[1] + path, json.dumps(body).encode())
    return json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10))
revision = ask("/v3/maintenance/status", {})["header"]["revision"]
ask("/v3/kv/compaction", {"revision": revision, "physical": True})
print(revision)
"""
WATCHED = ("engrammodels", "snapshotpolicies", "snapshots", "statefulsets", "pods", "services", "poddisruptionbudgets")


@pytest.fixture(scope="module")
def patient(cluster: Cluster, images: Images, operator: str) -> Iterator[str]:
    """An operator whose lease outlasts these faults: by default it ends itself after 10 s, and its successor lists
    everything anyhow."""
    names = ("leaseDurationSeconds", "renewDeadlineSeconds", "retryPeriodSeconds")
    settings = [f"leaderElection.{name}={value}" for name, value in zip(names, PATIENCE, strict=True)]
    install_operator(cluster, images, *settings)
    yield operator
    install_operator(cluster, images)


def operator_pod(cluster: Cluster, namespace: str) -> Object:
    def running() -> Object | None:
        found = [pod for pod in cluster.pods(namespace, OPERATOR_LABELS) if "deletionTimestamp" not in pod["metadata"]]
        return found[0] if len(found) == 1 else None

    return cluster.until("one operator", running, 60)


def restarts(pod: Object) -> int:
    return sum(status["restartCount"] for status in pod["status"]["containerStatuses"])


def drift(cluster: Cluster, served: Served) -> None:
    """What others do to the operator's objects: one deleted, one edited."""
    cluster.kubectl("delete", "poddisruptionbudget", MODEL, namespace=served.namespace)
    patch = json.dumps({"spec": {"selector": {"astray": "true"}}})
    cluster.kubectl("patch", "service", f"{MODEL}-pods", "--type=merge", "-p", patch, namespace=served.namespace)


def repaired(cluster: Cluster, served: Served, before: dict[str, Any]) -> Callable[[], bool]:
    return lambda: children(cluster, served.namespace, MODEL) == before


def test_killed_and_restarted_with_its_past_forgotten(
    cluster: Cluster, audit: AuditLog, patient: str, served: Served
) -> None:
    served.settle()
    before = children(cluster, served.namespace, MODEL)
    assert len(before) == 5
    pod = operator_pod(cluster, patient)
    user = service_account(patient, pod["spec"]["serviceAccountName"])
    listed = cluster.read("/apis/engram.dev/v1alpha1/engrammodels")
    assert listed is not None
    seen = listed["metadata"]["resourceVersion"]
    address = cluster.read(f"/api/v1/namespaces/{served.namespace}/services/{MODEL}")["spec"]["clusterIP"]  # type: ignore[index]

    with load_from_here(MODEL, address) as load:
        position = audit.position()
        with cluster.outage():
            cluster.kill(API_SERVER)
            time.sleep(1)
            compacted = int(cluster.run(*cluster.layout.enter(), sys.executable, "-c", COMPACT, ETCD))
            cluster.heal(API_SERVER)
            cluster.until("the API server is back", cluster.answers, ANSWERS_SECONDS)
        drift(cluster, served)
        cluster.until("drift is repaired", repaired(cluster, served, before), NOTICED_SECONDS)

    assert load.failed == []
    assert load.answered > 20
    assert compacted >= int(seen)
    event = cluster.read(f"/apis/engram.dev/v1alpha1/engrammodels?watch=1&timeoutSeconds=2&resourceVersion={seen}")
    assert event is not None
    assert (event["type"], event["object"]["code"]) == ("ERROR", GONE)  # where the operator's watches had stood

    def watches() -> set[str]:
        since = [entry for entry in audit.entries(position, user) if entry.status < 400]
        return {entry.resource for entry in since if entry.verb == "watch"} & {
            entry.resource for entry in since if entry.verb == "list"
        }

    cluster.until("everything is listed and watched again", lambda: watches() >= set(WATCHED), NOTICED_SECONDS)
    after = operator_pod(cluster, patient)
    assert after["metadata"]["uid"] == pod["metadata"]["uid"]
    assert restarts(after) == restarts(pod)
    served.settle()


@contextmanager
def severed(cluster: Cluster, pod: Object, verdict: str) -> Iterator[None]:
    """What a pod sends to the API server is dropped, or answered with a reset; nothing reaches it from there."""
    enter = cluster.layout.enter(pod["spec"]["nodeName"])
    rules = f"""
        table inet severed {{
          chain forward {{
            type filter hook forward priority -10;
            ip saddr {pod["status"]["podIP"]} tcp dport 6443 {verdict}
          }}
        }}
    """
    cluster.run(*enter, "nft", "-f", "-", stdin=rules)
    try:
        yield
    finally:
        cluster.run(*enter, "nft", "delete", "table", "inet", "severed")


@pytest.mark.parametrize("verdict", ["reject with tcp reset", "drop"], ids=["reset", "silent"])
def test_watches_that_are_cut(cluster: Cluster, audit: AuditLog, patient: str, served: Served, verdict: str) -> None:
    served.settle()
    before = children(cluster, served.namespace, MODEL)
    pod = operator_pod(cluster, patient)
    with severed(cluster, pod, verdict):
        drift(cluster, served)
        time.sleep(SEVERED_SECONDS)
        assert not repaired(cluster, served, before)()
    cluster.until("drift is repaired", repaired(cluster, served, before), NOTICED_SECONDS)

    after = operator_pod(cluster, patient)
    assert after["metadata"]["uid"] == pod["metadata"]["uid"]
    assert restarts(after) == restarts(pod)
