"""The pre-delete hook: what it does to a cluster, and that it may do that and no more."""

from __future__ import annotations

from typing import Any

import pytest

from engram_operator.kube.errors import Conflict
from engram_operator.kube.kinds import DEPLOYMENTS, MODELS, PODS, SNAPSHOTS
from engram_operator.uninstall import Release, StillRunning, uninstall
from tests.support.fake_kube import Failure, FakeKube
from tests.unit.chart.rendering import CLUSTER_SCOPED, NAMESPACE, one, render, values_files
from tests.unit.operator.documents import document

SELECTOR = "app.kubernetes.io/name=engram-operator"
CASES = values_files()


def release(**options: Any) -> Release:
    return Release(NAMESPACE, "engram-operator", SELECTOR, poll_s=0.0, log=lambda line: None, **options)


def cluster() -> FakeKube:
    kube = FakeKube()
    kube.put(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "engram-operator", "namespace": NAMESPACE},
            "spec": {"replicas": 2},
        }
    )
    spec = {"model": {"uri": "hf://a/b"}}
    for namespace in ("team-a", "team-b"):
        meta = {"namespace": namespace, "finalizers": ["engram.dev/drain", "example.com/other"]}
        kube.put(document("EngramModel", spec, "chat", **meta))
        source = {"modelRef": {"name": "chat"}, "source": {"snapshotID": "0" * 32}}
        kube.put(document("Snapshot", source, "s1", namespace=namespace, finalizers=["engram.dev/snapshot-data"]))
    kube.put(document("EngramModel", spec, "plain", namespace="team-a"))
    return kube


def finalizers(kube: FakeKube) -> dict[tuple[str, str], list[str]]:
    return {
        (obj["metadata"]["namespace"], obj["metadata"]["name"]): obj["metadata"].get("finalizers", [])
        for (kind, _, _), obj in kube.store.objects.items()
        if kind in (MODELS, SNAPSHOTS)
    }


async def test_it_stops_the_operator_and_frees_what_it_held():
    kube = cluster()
    assert await uninstall(kube, release()) == 4
    assert kube.find(DEPLOYMENTS, NAMESPACE, "engram-operator")["spec"]["replicas"] == 0
    assert finalizers(kube) == {
        ("team-a", "chat"): ["example.com/other"],
        ("team-a", "plain"): [],
        ("team-a", "s1"): [],
        ("team-b", "chat"): ["example.com/other"],
        ("team-b", "s1"): [],
    }


async def test_only_where_the_operator_worked():
    kube = cluster()
    assert await uninstall(kube, release(watch_namespaces=("team-b",))) == 2
    assert finalizers(kube)["team-a", "chat"] == ["engram.dev/drain", "example.com/other"]


async def test_again_it_finds_nothing_to_do():
    kube = cluster()
    await uninstall(kube, release())
    assert await uninstall(kube, release()) == 0


async def test_an_operator_that_does_not_stop_keeps_the_finalizers():
    kube = cluster()
    labels = dict([SELECTOR.split("=")])
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": NAMESPACE, "labels": labels}}
    kube.put({**pod, "spec": {}})
    with pytest.raises(StillRunning, match="p"):
        await uninstall(kube, release(timeout_s=0.0))
    assert finalizers(kube)["team-a", "chat"] == ["engram.dev/drain", "example.com/other"]
    await kube.delete(PODS, "p", NAMESPACE, grace_seconds=0)
    assert await uninstall(kube, release()) == 4


async def test_a_change_by_another_is_met_by_looking_again():
    kube = cluster()
    kube.network.failures.append(Failure(409, verb="patch", kind=MODELS, name="chat", times=2))
    assert await uninstall(kube, release()) == 4
    kube = cluster()
    kube.network.failures.append(Failure(409, verb="patch", kind=MODELS, name="chat", times=None))
    with pytest.raises(Conflict, match="all the time"):
        await uninstall(kube, release())


async def test_definitions_that_are_gone_already_are_no_obstacle():
    kube = cluster()
    kube.network.failures.append(Failure(404, verb="list", kind=MODELS, times=None))
    assert await uninstall(kube, release()) == 2


@pytest.mark.parametrize("case", ["default", "watched"])
async def test_the_hooks_rights_are_what_it_uses(case):
    """Every verb on every resource of the hook's roles is used, on the fake cluster, and nothing else is."""
    objects = [obj for obj in render(CASES[case]) if "uninstall" in obj["metadata"]["name"]]
    namespaces = tuple(CASES[case].get("watchNamespaces", ()))
    granted = set()
    for role in objects:
        for rule in role.get("rules", ()):
            granted |= {(verb, resource) for verb in rule["verbs"] for resource in rule["resources"]}
    kube = cluster()
    kube.network.failures.append(Failure(409, verb="patch", kind=MODELS, times=1))
    kube.network.failures.append(Failure(409, verb="patch", kind=SNAPSHOTS, times=1))
    await uninstall(kube, release(watch_namespaces=("team-a",) if namespaces else ()))
    used = {(request.verb, request.kind.plural) for request in kube.store.requests}
    assert used == granted
    assert {obj["kind"] in CLUSTER_SCOPED for obj in objects if obj["kind"].endswith(("Role", "Binding"))} == (
        {False} if namespaces else {True, False}
    )


def test_everything_of_the_hook_is_a_hook():
    """So that none of it is there while the release is installed."""
    objects = [obj for obj in render() if "uninstall" in obj["metadata"]["name"]]
    assert {obj["metadata"]["annotations"]["helm.sh/hook"] for obj in objects} == {"pre-delete"}
    weights = {obj["kind"]: int(obj["metadata"]["annotations"]["helm.sh/hook-weight"]) for obj in objects}
    assert max(weights, key=lambda kind: weights[kind]) == "Job"


def test_its_selector_is_the_deployments():
    args = one(render(), "Job")["spec"]["template"]["spec"]["containers"][0]["args"]
    (selector,) = [arg.partition("=")[2] for arg in args if arg.startswith("--selector=")]
    labels = one(render(), "Deployment")["spec"]["selector"]["matchLabels"]
    assert dict(part.split("=") for part in selector.split(",")) == labels
    assert f"--deployment={one(render(), 'Deployment')['metadata']['name']}" in args
