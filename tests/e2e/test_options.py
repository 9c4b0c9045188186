"""What a model's spec may ask for and give back: each optional object comes when it is wanted and goes when not.

The model is suspended: it has all its objects, and no pod to wait for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import resources
from tests.e2e.cluster.client import Client, names
from tests.e2e.conftest import new_namespace

MODEL = "plain"
KNOWN_SECONDS = 60  # admission looks kinds up anew every half a minute: ours may just have been installed
NETWORK = "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies"
BUDGETS = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"
MONITORS = "/apis/monitoring.coreos.com/v1/namespaces/{}/podmonitors"
DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
ACCOUNTS = "/api/v1/namespaces/{}/serviceaccounts"
# As much of the Prometheus operator as is needed to store one.
POD_MONITOR = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {
            "plural": "podmonitors",
            "singular": "podmonitor",
            "kind": "PodMonitor",
            "listKind": "PodMonitorList",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                },
            }
        ],
    },
}


@pytest.fixture(scope="module")
def plain(kube: Client, operator: str, tiny_model: str) -> Iterator[str]:
    """The namespace of a suspended model of two replicas."""
    definition = POD_MONITOR["metadata"]["name"]  # type: ignore[index]
    there = kube.read(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition}") is not None
    with new_namespace(kube, "options") as namespace:
        if not there:
            kube.apply(POD_MONITOR)
            kube.kubectl("wait", "--for=condition=Established", f"customresourcedefinition/{definition}")
        kube.apply(resources.model(MODEL, tiny_model, replicas=2, suspend=True), namespace=namespace)
        accounts = ACCOUNTS.format(namespace)
        kube.until("its account", lambda: f"{MODEL}-engine" in names(kube.objects(accounts)), KNOWN_SECONDS)
        yield namespace
        kube.kubectl("delete", "engrammodel", MODEL, "--timeout=60s", namespace=namespace)
        if not there:
            kube.kubectl("delete", "customresourcedefinition", str(definition), "--timeout=60s")


def change(kube: Client, namespace: str, **spec: Any) -> None:
    patch = json.dumps({"spec": spec})
    kube.kubectl("patch", "engrammodel", MODEL, "--type=merge", "-p", patch, namespace=namespace)


def there(kube: Client, namespace: str, where: dict[str, str]) -> list[bool]:
    """Whether each name is in its list."""
    return [name in names(kube.objects(path.format(namespace))) for path, name in where.items()]


# The spec that asks for objects, the one that gives them back, and the lists that they appear in with their names.
OPTIONS = {
    "network-policy": ({"networkPolicy": {"enabled": True}}, {"networkPolicy": {"enabled": False}}, {NETWORK: MODEL}),
    "pod-monitor": ({"monitoring": {"enabled": True}}, {"monitoring": {"enabled": False}}, {MONITORS: MODEL}),
    "account": ({"serviceAccountName": None}, {"serviceAccountName": "default"}, {ACCOUNTS: f"{MODEL}-engine"}),
    "running": (
        {"suspend": False, "scaleToZero": {}},
        {"suspend": True},
        {BUDGETS: MODEL, DEPLOYMENTS: "engram-activator"},
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_it_comes_and_goes(kube: Client, plain: str, option: str) -> None:
    on, off, where = OPTIONS[option]
    change(kube, plain, **on)
    kube.until(f"{where} are there", lambda: all(there(kube, plain, where)), 90)
    change(kube, plain, **off)
    kube.until(f"{where} are gone", lambda: not any(there(kube, plain, where)), 60)


def test_what_somebody_deletes_or_changes_is_put_back(kube: Client, plain: str) -> None:
    kube.kubectl("delete", "service", MODEL, namespace=plain)
    kube.until("the Service is back", lambda: kube.read(f"/api/v1/namespaces/{plain}/services/{MODEL}"), 30)
    patch = json.dumps({"spec": {"template": {"spec": {"enableServiceLinks": True}}}})
    kube.kubectl("patch", "statefulset", MODEL, "--type=merge", "-p", patch, namespace=plain)

    def repaired() -> bool:
        found = kube.read(f"/apis/apps/v1/namespaces/{plain}/statefulsets/{MODEL}") or {}
        return found["spec"]["template"]["spec"].get("enableServiceLinks") is False

    kube.until("the StatefulSet is as it was", repaired, 30)


def test_a_name_that_is_somebody_elses_is_left_alone(kube: Client, plain: str, tiny_model: str) -> None:
    taken = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken"}, "spec": {"ports": [{"port": 80}]}}
    kube.apply(taken, namespace=plain)
    kube.apply(resources.model("taken", tiny_model, suspend=True), namespace=plain)

    def refused() -> bool:
        status = (kube.custom("engrammodels", plain, "taken") or {}).get("status") or {}
        return any(entry["reason"] == "NameTaken" for entry in status.get("conditions", []))

    kube.until("the model says that the name is taken", refused, 30)
    found = kube.read(f"/api/v1/namespaces/{plain}/services/taken")
    assert found is not None
    assert "ownerReferences" not in found["metadata"]
    kube.kubectl("delete", "engrammodel", "taken", "--timeout=60s", namespace=plain)
