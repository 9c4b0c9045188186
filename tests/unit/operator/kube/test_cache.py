"""The cache's lookups, and what it keeps of an object."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engram_operator.kube.cache import Cache, slim
from engram_operator.kube.kinds import PODS, SERVICES, SNAPSHOTS


def made(name: str, *, uid: str = "", namespace: str = "default", owner: str = "", **labels: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-{namespace}-{name}",
        "labels": labels,
    }
    if owner:
        metadata["ownerReferences"] = [{"uid": owner, "kind": "EngramModel", "name": "x"}]
    return {"metadata": metadata}


def names(objects: list[dict[str, Any]]) -> list[str]:
    return sorted(obj["metadata"]["name"] for obj in objects)


def test_lookups_by_name_owner_and_labels() -> None:
    cache = Cache()
    cache.put(PODS, made("a", owner="m1", app="x", tier="1"))
    cache.put(PODS, made("b", owner="m1", app="x"))
    cache.put(PODS, made("c", namespace="other", owner="m1", app="x"))
    cache.put(SERVICES, made("a", owner="m1", app="x"))
    assert names(cache.list(PODS)) == ["a", "b", "c"]
    assert names(cache.list(PODS, "default")) == ["a", "b"]
    assert names(cache.owned(PODS, "default", "m1")) == ["a", "b"]
    assert names(cache.labelled(PODS, "default", {"app": "x", "tier": "1"})) == ["a"]
    assert cache.get(PODS, "other", "a") is None
    assert cache.counts() == {PODS: 3, SERVICES: 1}


def test_an_object_that_changed_hands_leaves_its_old_owner() -> None:
    cache = Cache()
    cache.put(PODS, made("a", owner="m1"))
    before = cache.put(PODS, made("a", owner="m2"))
    assert before is not None
    assert cache.owned(PODS, "default", "m1") == []
    assert names(cache.owned(PODS, "default", "m2")) == ["a"]


def test_a_new_object_of_the_same_name_replaces_the_old_one_everywhere() -> None:
    cache = Cache()
    cache.put(PODS, made("a", uid="1", owner="m"))
    cache.put(PODS, made("a", uid="2", owner="m"))
    assert [pod["metadata"]["uid"] for pod in cache.owned(PODS, "default", "m")] == ["2"]
    assert cache.remove(PODS, "default", "a") is not None
    assert cache.remove(PODS, "default", "a") is None
    assert cache.owned(PODS, "default", "m") == []


def test_what_no_controller_reads_is_not_kept() -> None:
    pod = made("a")
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    pod["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "1"}
    container = {"name": "engine", "image": "i", "env": [{"name": "X", "value": "y"}], "args": ["--flag"]}
    pod["spec"] = {"nodeName": "n1", "containers": [container], "tolerations": [{"key": "k"}]}
    pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    kept = slim(PODS, pod)
    assert kept["metadata"].keys() == {"name", "namespace", "uid", "labels", "annotations"}
    assert kept["metadata"]["annotations"] == {"mine": "1"}
    assert kept["spec"] == {"nodeName": "n1", "initContainers": [], "containers": [{"name": "engine", "image": "i"}]}
    assert kept["status"] == pod["status"]


def test_equal_keys_and_short_strings_are_one_object() -> None:
    first = slim(SNAPSHOTS, {"metadata": {"name": "a"}, "status": {"".join(["phase"]): "".join(["Sto", "red"])}})
    second = slim(SNAPSHOTS, {"metadata": {"name": "b"}, "status": {"".join(["pha", "se"]): "".join(["St", "ored"])}})
    assert first["status"]["phase"] is second["status"]["phase"]


keys = st.tuples(st.sampled_from("abc"), st.sampled_from(["n1", "n2"]))
steps = st.lists(st.tuples(keys, st.sampled_from(["m1", "m2", ""]), st.booleans()))


@given(steps)
def test_indexes_always_say_what_the_objects_say(history: list[tuple[tuple[str, str], str, bool]]) -> None:
    cache = Cache()
    truth: dict[tuple[str, str], str] = {}
    for (name, namespace), owner, keep in history:
        if keep:
            cache.put(PODS, made(name, namespace=namespace, owner=owner))
            truth[name, namespace] = owner
        else:
            cache.remove(PODS, namespace, name)
            truth.pop((name, namespace), None)
    for owner in ("m1", "m2"):
        for namespace in ("n1", "n2"):
            expected = sorted(name for (name, space), of in truth.items() if of == owner and space == namespace)
            assert names(cache.owned(PODS, namespace, owner)) == expected
    assert cache.counts().get(PODS, 0) == len(truth)
