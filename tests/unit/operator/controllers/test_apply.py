"""When a child is as it should be: what an API server makes of our objects, and what others make of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_operator.builders import BuildSettings, activator, desired
from engram_operator.controllers.apply import Applier, carries
from engram_operator.controllers.rollout import RENDERED, immutable_problems, plan, read_record
from engram_operator.kube.kinds import STATEFULSETS
from engram_operator.settings import RollPolicy
from tests.support.fake_kube import FakeKube
from tests.unit.operator.controllers.world import NS, START
from tests.unit.operator.documents import model
from tests.unit.operator.golden_cases import CASES

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(json_values)
def test_everything_carries_itself(value: Any) -> None:
    assert carries(copy.deepcopy(value), value)


@pytest.mark.parametrize(
    ("live", "ours", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"a": False}, True),  # left out because it is the zero value
        ({}, {"a": []}, True),
        ({}, {"value": ""}, True),
        ({}, {"a": 0}, True),
        ({}, {"a": 1}, False),
        ({"requests": {"cpu": "1500m"}}, {"requests": {"cpu": 1.5}}, True),
        ({"requests": {"cpu": "8"}}, {"requests": {"cpu": 8}}, True),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "2Gi"}}, False),
        ({"sizeLimit": "1Gi"}, {"sizeLimit": "1024Mi"}, True),
        ({"other": "1Gi"}, {"other": "1024Mi"}, False),
        ({"requests": {"cpu": "x"}}, {"requests": {"cpu": 1}}, False),
        ({"args": ["a", "b"]}, {"args": ["a"]}, False),
        ({"args": ["b", "a"]}, {"args": ["a", "b"]}, False),
        ({"args": "a"}, {"args": ["a"]}, False),
        ({"a": [1]}, {"a": {}}, False),
        ({"selector": {"a": "1", "b": "2"}}, {"selector": {"a": "1"}}, False),
        ({"selector": {"matchLabels": {"a": "1", "b": "2"}}}, {"selector": {"matchLabels": {"a": "1"}}}, False),
        ({"selector": {"matchLabels": {"a": "1"}}}, {"selector": {"matchLabels": {"a": "1"}}}, True),
        ({"nodeSelector": {"a": "1", "b": "2"}}, {"nodeSelector": {"a": "1"}}, False),
        ({"podSelector": {}}, {"podSelector": {}}, True),
        ({"podSelector": {"matchLabels": {"a": "1"}}}, {"podSelector": {}}, False),
        ({"tolerations": [{"key": "a"}, {"key": "b"}]}, {"tolerations": [{"key": "a"}]}, False),
        ({"containers": [{"name": "x"}, {"name": "a", "b": 1}]}, {"containers": [{"name": "a"}]}, True),
        ({"containers": [{"name": "x"}]}, {"containers": [{"name": "a"}]}, False),
        ({"ports": [{"containerPort": 1, "protocol": "TCP"}]}, {"ports": [{"containerPort": 1}]}, True),
        ({"ports": [{"port": 1}, {"port": 2}]}, {"ports": [{"port": 2}]}, True),
        ({"ports": [{"name": "a"}]}, {"ports": [{"name": "b"}]}, False),
    ],
)
def test_carries(live: Any, ours: Any, same: bool) -> None:
    assert carries(live, ours) is same


def as_stored(value: Any, field: str = "", parent: str = "") -> Any:
    """What an API server keeps of an object: quantities canonical, zero values left out, defaults added."""
    if isinstance(value, dict):
        if field.endswith("elector"):  # of one piece: a server adds nothing
            return value
        kept = {}
        for key, child in value.items():
            stored = as_stored(child, key, field)
            if stored not in (False, "", 0, [], None) or key in ("automountServiceAccountToken", "partition"):
                kept[key] = stored
        return {**kept, "defaulted": {"by": "server"}} if kept and field not in ("labels", "annotations") else kept
    if isinstance(value, list):
        return [as_stored(item) for item in value]
    return str(value) if parent in ("requests", "limits") else value


@pytest.mark.parametrize("case", CASES)
def test_what_a_server_adds_and_leaves_out_is_no_difference(case: str) -> None:
    for obj in CASES[case]():
        assert carries(as_stored(obj), obj)


async def test_an_object_that_the_server_keeps_in_another_form_is_written_once() -> None:
    kube = FakeKube()
    applier = Applier(kube, kube.cache)
    (obj,) = [o for o in desired(model(), None, BuildSettings("x")) if o["kind"] == "StatefulSet"]
    assert await applier.ensure(obj)
    original = kube.apply

    async def another_form(applied: Any, *, dry_run: bool = False) -> Any:
        await original(applied, dry_run=dry_run)
        return kube.edit(STATEFULSETS, NS, "granite", {"spec": {"serviceName": "canonical"}})

    kube.apply = another_form  # type: ignore[method-assign]
    changed = copy.deepcopy(obj)
    changed["spec"]["revisionHistoryLimit"] = 4
    assert await applier.ensure(changed)
    assert not await applier.ensure(changed), "applying it again would change nothing"
    kube.set_status(STATEFULSETS, NS, "granite", {"replicas": 1})
    assert not await applier.ensure(changed), "a status is none of ours"
    kube.edit(STATEFULSETS, NS, "granite", {"spec": {"replicas": 7}})
    assert await applier.ensure(changed), "an edit is repaired all the same"


def rendered(**spec: Any) -> dict[str, Any]:
    objects = desired(model(**spec), None, BuildSettings("engine:1"))
    return next(obj for obj in objects if obj["kind"] == "StatefulSet")


def test_the_record_survives_and_a_damaged_one_is_none() -> None:
    made = plan(rendered(), None, "inputs", RollPolicy.ON_SPEC_CHANGE, START, no_pods=True).stateful_set
    record = read_record(made)
    assert record is not None
    assert record.template == rendered()["spec"]["template"]
    assert (record.inputs, record.since) == ("inputs", START)
    text = made["metadata"]["annotations"][RENDERED]
    assert len(text) < 4000
    for damaged in ("", "x", text[:-3], text.replace(text[:12], "0" * 12), f"{text[:13]}AAAA"):
        made["metadata"]["annotations"][RENDERED] = damaged
        assert read_record(made) is None


@given(st.text(max_size=50))
def test_any_text_may_stand_where_the_record_was(text: str) -> None:
    assert read_record({"metadata": {"annotations": {RENDERED: text}}}) is None


def test_what_of_the_claims_cannot_change_is_named() -> None:
    def rewritten(spec: dict[str, Any]) -> dict[str, Any]:
        spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] = "1024Mi"
        return spec

    def claimed(**cache: Any) -> dict[str, Any]:
        return rendered(cache={"type": "PersistentVolumeClaim", "size": "1Gi", **cache})

    assert immutable_problems(claimed(), claimed()) == []
    assert immutable_problems(claimed(), {"spec": rewritten(claimed()["spec"])}) == [], "the same in another unit"
    assert "size: cannot change from 1Gi to 2Gi" in immutable_problems(claimed(size="2Gi"), claimed())[0]
    assert "storageClassName" in immutable_problems(claimed(storageClassName="fast"), claimed())[0]
    assert "claimName" in immutable_problems(claimed(claimName="mine"), claimed())[0]
    # an absent class was filled in by the cluster
    assert immutable_problems(claimed(), claimed(storageClassName="default")) == []


def test_the_activator_is_stable() -> None:
    settings = BuildSettings("x", operator_account="engram")
    assert activator("ns", [("a", "1"), ("b", "2")], settings) == activator("ns", [("b", "2"), ("a", "1")], settings)
