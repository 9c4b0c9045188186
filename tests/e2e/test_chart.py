"""A release's life by helm: test, upgrade, uninstall, install again, and the definitions deleted at last.

Models and what they keep are the user's: nothing here restarts or deletes them before the user does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e import resources
from tests.e2e.caller import Caller
from tests.e2e.cluster.client import Object, condition
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.conftest import (
    CHART,
    OPERATOR_NAMESPACE,
    RELEASE,
    Images,
    ObjectStore,
    install_operator,
    new_namespace,
    operator_values,
    uninstall_operator,
)

pytestmark = pytest.mark.stage("chart")
MODEL = "lasting"
READY_SECONDS = 240
DEFINITIONS = ("engrammodels", "snapshotpolicies", "snapshots")
TEAM = "team"
FINALIZERS = "engram.dev/"
ENGINES = "app.kubernetes.io/name=engram-engine"
# Everything that helm or the hooks may make, by `kubectl get`; the release's own records too.
INSIDE = "all,secrets,configmaps,serviceaccounts,roles,rolebindings,poddisruptionbudgets,networkpolicies,leases,jobs"
OUTSIDE = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
# The key of the model that `helm test` made is the user's; the lease is the operator's own, and nobody holds it.
STAYS = {"secret/engram-tenant-key", "lease.coordination.k8s.io/engram-operator"}


@dataclass(frozen=True, slots=True)
class Lasting:
    """A model with a policy and a Snapshot, so that both finalizers are there."""

    cluster: Cluster
    images: Images
    namespace: str
    caller: Caller

    def model(self) -> Object:
        return self.cluster.custom("engrammodels", self.namespace, MODEL) or {}

    def pods(self) -> list[tuple[str, int]]:
        """Uid and restarts: whoever was restarted has others."""
        found = self.cluster.pods(self.namespace, f"app.kubernetes.io/instance={MODEL}")
        return [
            (pod["metadata"]["uid"], status["restartCount"])
            for pod in found
            for status in pod["status"]["containerStatuses"]
        ]

    def finalizers(self) -> list[str]:
        listed = [
            item
            for plural in DEFINITIONS
            for item in self.cluster.objects(f"/apis/engram.dev/v1alpha1/namespaces/{self.namespace}/{plural}")
        ]
        return sorted(name for item in listed for name in item["metadata"].get("finalizers", []))

    def chats(self) -> None:
        answer = self.caller.chat(MODEL, "Are you there?", conversation="lasting")
        assert answer.status == 200, answer.text

    def left_of_the_release(self) -> set[str]:
        """Whatever is in its namespace that Kubernetes did not put there, and what carries its label outside."""
        inside = self.cluster.kubectl("get", INSIDE, "-o", "name", namespace=OPERATOR_NAMESPACE).split()
        labels = f"app.kubernetes.io/instance={RELEASE}"
        outside = self.cluster.kubectl("get", OUTSIDE, "-o", "name", "-l", labels).split()
        return {*inside, *outside} - {"configmap/kube-root-ca.crt", "serviceaccount/default"}


@pytest.fixture(scope="module")
def lasting(
    cluster: Cluster, images: Images, operator: str, object_store: ObjectStore, tiny_model: str
) -> Iterator[Lasting]:
    with new_namespace(cluster, "lasting") as namespace:
        policy = resources.policy(object_store, object_store.bucket())
        cluster.apply(object_store.secret(), policy, resources.model(MODEL, tiny_model), namespace=namespace)
        caller = Caller.start(cluster, images.engine, namespace)
        caller.wait_for(MODEL, READY_SECONDS)
        made = Lasting(cluster, images, namespace, caller)
        made.chats()
        cluster.until("both finalizers", lambda: len(set(made.finalizers())) == 2)
        yield made
        if cluster.stays():  # others use it
            install_operator(cluster, images)


def test_helm_test_sees_a_second_turn_restored(lasting: Lasting, tiny_model: str) -> None:
    cluster = lasting.cluster
    install_operator(cluster, lasting.images, f"helmTest.create.uri={tiny_model}")
    logs = cluster.helm("test", RELEASE, "--namespace", OPERATOR_NAMESPACE, "--logs", "--timeout", "300s", timeout=360)
    assert "Succeeded" in logs
    assert "the second turn computed" in logs
    assert cluster.custom("engrammodels", OPERATOR_NAMESPACE, f"{RELEASE}-operator-test") is None


def test_an_upgrade_restarts_the_operator_and_no_model(lasting: Lasting) -> None:
    """Even one that brings another engine image; the model says what waits."""
    cluster, before = lasting.cluster, lasting.pods()
    install_operator(cluster, lasting.images, "engine.image.tag=next", "logLevel=debug")

    def waits() -> Object | None:
        said = condition(lasting.model(), "UpToDate")
        return said if said.get("reason") == "OperatorUpgradePending" else None

    said = cluster.until("the model says that an upgrade waits", waits)
    assert "next" in said["message"]
    lasting.chats()
    install_operator(cluster, lasting.images)
    cluster.until("nothing waits any more", lambda: condition(lasting.model(), "UpToDate").get("status") == "True")
    assert lasting.pods() == before


def test_uninstalling_leaves_definitions_and_what_users_made(lasting: Lasting) -> None:
    cluster, before = lasting.cluster, lasting.pods()
    uninstall_operator(cluster)

    assert lasting.left_of_the_release() == STAYS
    assert cluster.pods(OPERATOR_NAMESPACE) == []
    assert [name for name in lasting.finalizers() if name.startswith(FINALIZERS)] == []
    for plural in DEFINITIONS:
        assert cluster.objects(f"/apis/engram.dev/v1alpha1/namespaces/{lasting.namespace}/{plural}"), plural
    lasting.chats()
    assert lasting.pods() == before


def test_a_team_without_rights_on_the_cluster_runs_it_in_its_namespaces(lasting: Lasting, tiny_model: str) -> None:
    """As docs/install.md says: an administrator applies definitions and roles, the team installs the rest."""
    cluster = lasting.cluster
    with new_namespace(cluster, "team-a") as home, new_namespace(cluster, "team-b") as other:
        for namespace in (home, other):
            binding = ["rolebinding", "team", "--clusterrole=admin", "--user=team"]
            cluster.kubectl("create", *binding, namespace=namespace)
        chart = (TEAM, str(CHART), "--namespace", home, "--set", f"watchNamespaces={{{home},{other}}}")
        roles = ("rbac", "aggregated-roles")
        shown = [word for name in roles for word in ("--show-only", f"templates/{name}.yaml")]
        cluster.apply(cluster.helm("template", *chart, *shown))
        try:
            off = (
                "crds.install",
                "rbac.create",
                "rbac.aggregate",
                "admissionPolicy.enabled",
                "uninstall.releaseFinalizers",
            )
            values = [f"{name}=false" for name in off] + operator_values(cluster, lasting.images)
            words = [word for value in values for word in ("--set", value)]
            team = ("--kube-as-user", "team", "--wait", "--timeout", "120s")
            cluster.helm("install", *chart, *words, *team)
            for namespace in (home, other):
                model = json.dumps(resources.model("small", tiny_model, suspend=True))
                cluster.kubectl("apply", "-f", "-", "--as", "team", namespace=namespace, stdin=model)
                cluster.wait("engrammodel/small", "condition=Accepted", namespace, 60)
                cluster.kubectl("delete", "engrammodel", "small", "--as", "team", "--timeout=60s", namespace=namespace)
            assert [name for name in lasting.finalizers() if name.startswith(FINALIZERS)] == []  # not its namespace
            cluster.helm("uninstall", TEAM, "--namespace", home, *team)
        finally:
            cluster.kubectl("delete", "-f", "-", stdin=cluster.helm("template", *chart, *shown))


def test_a_later_release_takes_over_what_is_there(lasting: Lasting) -> None:
    cluster, before = lasting.cluster, lasting.pods()
    install_operator(cluster, lasting.images)
    cluster.until("both finalizers again", lambda: len(set(lasting.finalizers())) == 2)
    patch = json.dumps({"spec": {"replicas": 2}})
    cluster.kubectl("patch", "engrammodel", MODEL, "--type=merge", "-p", patch, namespace=lasting.namespace)
    cluster.until("a second pod", lambda: len(cluster.pods(lasting.namespace, ENGINES)) == 2)
    patch = json.dumps({"spec": {"replicas": 1}})
    cluster.kubectl("patch", "engrammodel", MODEL, "--type=merge", "-p", patch, namespace=lasting.namespace)
    cluster.until("one pod, the old one", lambda: lasting.pods() == before, 120)


def test_without_an_operator_the_definitions_can_be_deleted(lasting: Lasting) -> None:
    """All resources and their pods go with them, and nothing waits for somebody who is not there any more."""
    cluster = lasting.cluster
    uninstall_operator(cluster)
    began = time.monotonic()
    cluster.kubectl("delete", "-f", str(CHART.parents[1] / "crds"), "--timeout=60s")
    assert time.monotonic() - began < 60
    cluster.until("the pods are gone", lambda: not cluster.pods(lasting.namespace, ENGINES), 90)
