"""The operator dies after each kind of write, again and again: what it leaves in the end is what it always leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.e2e import pods, resources
from tests.e2e.cluster.audit import AuditLog, Entry, service_account
from tests.e2e.cluster.client import Client, Object, condition, is_ready
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.conftest import RELEASE, TIMINGS, Images, install_operator, new_namespace
from tests.e2e.under_fault.children import children, status
from tests.e2e.under_fault.conftest import MODEL, READY_SECONDS, Served

OPERATOR_LABELS = "app.kubernetes.io/component=operator"
LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 4, 3, 1  # the chart's default is 15, 10, 2
TAKE_OVER_SECONDS = LEASE_SECONDS + 2 * RETRY_SECONDS + 10  # and it lists everything
SETTLED_SECONDS = 60
SETTLING_SECONDS = 3  # from the first word about pods to the last
# One of each kind that a model is made of.
CREATED = (
    ("patch", "engrammodels"),
    ("patch", "serviceaccounts"),
    ("patch", "services"),
    ("patch", "statefulsets"),
    ("patch", "poddisruptionbudgets"),
    ("patch", "engrammodels/status"),
)
UPDATED = (("patch", "statefulsets"), ("delete", "pods"), ("patch", "engrammodels/status"))
LEFT_ALONE = "undisturbed"


@dataclass(slots=True)
class Operators:
    """Two operators, of which one leads, and the writes that they make."""

    cluster: Cluster
    namespace: str
    audit: AuditLog
    user: str
    kills: int = 0

    def leader(self) -> str:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{RELEASE}-operator"
        return str(((self.cluster.read(path) or {}).get("spec") or {}).get("holderIdentity") or "")

    def find_leader(self) -> Object:
        def found() -> Object | None:
            leader = self.leader()
            there = {pod["metadata"]["name"]: pod for pod in self.cluster.pods(self.namespace, OPERATOR_LABELS)}
            return there.get(leader)

        return self.cluster.until("an operator leads", found, TAKE_OVER_SECONDS)

    def kill(self, leader: Object) -> None:
        """As when it runs out of memory. Its pod goes too: kubelet would wait longer before each restart."""
        name = leader["metadata"]["name"]
        for process in pods.processes(self.cluster, leader, "engram-operator"):
            os.kill(process, signal.SIGKILL)
        self.cluster.kubectl("delete", "pod", name, "--force", "--grace-period=0", namespace=self.namespace)
        self.kills += 1

    def kill_after(self, what: str, wrote: Callable[[Entry], bool], act: Callable[[], object]) -> None:
        """Kills the leader as soon as it has made a write, which `act` leads it to; another one leads afterwards."""
        leader, position = self.find_leader(), self.audit.position()
        act()
        until = time.monotonic() + SETTLED_SECONDS
        while not any(entry.status < 400 and wrote(entry) for entry in self.audit.entries(position, self.user)):
            assert time.monotonic() < until, f"no such write: {what}"
            time.sleep(0.02)
        self.kill(leader)
        self.taken_over(leader)

    def taken_over(self, before: Object) -> None:
        name = before["metadata"]["name"]
        self.cluster.until("another one leads", lambda: self.leader() not in ("", name), TAKE_OVER_SECONDS)


@pytest.fixture(scope="module")
def operators(cluster: Cluster, images: Images, operator: str, audit: AuditLog) -> Iterator[Operators]:
    """With a short lease, so that a death costs seconds."""
    lease = f"{LEASE_SECONDS} {RENEW_SECONDS} {RETRY_SECONDS}".split()
    names = ("leaseDurationSeconds", "renewDeadlineSeconds", "retryPeriodSeconds")
    settings = [f"leaderElection.{name}={value}" for name, value in zip(names, lease, strict=True)]
    install_operator(cluster, images, "replicaCount=2", *settings)
    account = cluster.pods(operator, OPERATOR_LABELS)[0]["spec"]["serviceAccountName"]
    yield Operators(cluster, operator, audit, service_account(operator, account))
    install_operator(cluster, images)


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[str]:
    with new_namespace(cluster, "killed") as name:
        yield name


def too_large(name: str, uri: str, value: str) -> Object:
    """A model of two replicas that no node has the room for: all of its objects, and no engine to wait for."""
    env = [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "VALUE", "value": value}]
    requests = {"requests": {"cpu": "1000", "memory": "512Mi"}}
    return resources.model(name, uri, replicas=2, resources=requests, engine={**resources.ENGINE, "env": env})


def end_state(kube: Client, namespace: str, name: str) -> dict[str, Any]:
    return {"children": children(kube, namespace, name), "status": status(kube, namespace, name)}


def by(namespace: str, verb: str, resource: str, *names: str) -> Callable[[Entry], bool]:
    """Writes of one kind in a namespace; of objects of these names, when any is given."""

    def wrote(entry: Entry) -> bool:
        same = (entry.namespace, entry.verb, entry.resource) == (namespace, verb, resource)
        return same and (not names or entry.name in names)

    return wrote


def test_killed_after_every_kind_of_write(cluster: Cluster, operators: Operators, place: str, tiny_model: str) -> None:
    cluster.apply(too_large(LEFT_ALONE, tiny_model, "second"), namespace=place)

    def judged() -> dict[str, Any] | None:
        live = cluster.custom("engrammodels", place, LEFT_ALONE)
        return live if condition(live, "Ready").get("reason") == "InsufficientResources" else None

    cluster.until("the undisturbed one is said not to fit", judged, SETTLED_SECONDS)
    time.sleep(SETTLING_SECONDS)
    expected = end_state(cluster, place, LEFT_ALONE)
    assert len(expected["children"]) == 5
    disturbed = []
    for number, (verb, resource) in enumerate(CREATED):
        name = f"disturbed-{number}"
        belongs = (name, f"{name}-pods", f"{name}-engine")
        create = partial(cluster.apply, too_large(name, tiny_model, "first"), namespace=place)
        operators.kill_after(f"{verb} {resource}", by(place, verb, resource, *belongs), create)
        disturbed.append(name)
    for name, (verb, resource) in zip(disturbed, UPDATED, strict=False):
        # Pods that never ran are replaced by the operator: the StatefulSet would wait for them for ever.
        belongs = (name, f"{name}-0", f"{name}-1")
        update = partial(cluster.apply, too_large(name, tiny_model, "second"), namespace=place)
        operators.kill_after(f"{verb} {resource}", by(place, verb, resource, *belongs), update)
    cluster.apply(*(too_large(name, tiny_model, "second") for name in disturbed), namespace=place)

    for name in disturbed:

        def same(name: str = name) -> bool:
            found = end_state(cluster, place, name)
            found["status"]["observedGeneration"] -= 1  # it was changed once
            for entry in found["status"]["conditions"]:
                entry["observedGeneration"] -= 1
            return found == expected

        try:
            cluster.until(f"{name} is as the undisturbed one", same, SETTLED_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{end_state(cluster, place, name)}\n{expected}") from error
        for pod in cluster.pods(place, f"app.kubernetes.io/instance={name}"):
            assert {"name": "VALUE", "value": "second"} in pod["spec"]["containers"][0]["env"]


def test_killed_in_the_middle_of_a_rollout(
    cluster: Cluster, operators: Operators, served: Served, request: pytest.FixtureRequest
) -> None:
    """Pods are replaced once each, whoever leads."""
    before = served.settle()
    expected = children(cluster, served.namespace, MODEL)
    seen: set[str] = set()

    def change() -> None:
        env = [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "CHANGED", "value": "under-kills"}]
        patch = json.dumps({"spec": {"engine": {"env": env}}})
        cluster.kubectl("patch", "engrammodel", MODEL, "--type=merge", "-p", patch, namespace=served.namespace)

    def replaced(count: int) -> Callable[[], bool]:
        def enough() -> bool:
            new = {pod["metadata"]["uid"] for pod in served.pods().values()}
            seen.update(new)
            return len(new - {pod["metadata"]["uid"] for pod in before.values()}) >= count

        return enough

    operators.kill_after("change", by(served.namespace, "patch", "statefulsets", MODEL), change)
    for count in (1, 2):
        cluster.until(f"{count} of the pods replaced", replaced(count), READY_SECONDS)
        leader = operators.find_leader()
        operators.kill(leader)
        operators.taken_over(leader)
    after = served.settle()
    replaced(2)()

    assert len(seen - {pod["metadata"]["uid"] for pod in before.values()}) == len(after) == 2
    for pod in after.values():
        assert {"name": "CHANGED", "value": "under-kills"} in pod["spec"]["containers"][0]["env"]
    found = children(cluster, served.namespace, MODEL)
    template = found["StatefulSet MODEL"]["spec"]["template"]["spec"]["containers"][0]
    template["env"] = expected["StatefulSet MODEL"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert found == expected
    request.config.stash[TIMINGS]["operators killed (number)"] = operators.kills


def test_killed_while_a_model_is_deleted(cluster: Cluster, operators: Operators, place: str, tiny_model: str) -> None:
    name = "ending"
    cluster.apply(resources.model(name, tiny_model), namespace=place)
    cluster.until(f"{name} is Ready", lambda: is_ready(cluster.custom("engrammodels", place, name)), READY_SECONDS)

    def delete() -> None:
        cluster.kubectl("delete", "engrammodel", name, "--wait=false", namespace=place)

    operators.kill_after("pods are stopped", by(place, "patch", "statefulsets", name), delete)
    cluster.until("the pods are gone", lambda: not cluster.pods(place, f"app.kubernetes.io/instance={name}"), 60)
    operators.kill(operators.find_leader())

    cluster.until("the model is gone", lambda: cluster.custom("engrammodels", place, name) is None, SETTLED_SECONDS)
    cluster.until("nothing of it is left", lambda: not children(cluster, place, name), SETTLED_SECONDS)
