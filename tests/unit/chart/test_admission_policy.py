"""The ValidatingAdmissionPolicy's expressions, evaluated by a CEL library on models that should pass and should not.

The operator refuses the same in builders/overlay.py; both are run on each case, so neither lets through what the other
stops.
"""

from __future__ import annotations

from typing import Any

import pytest

from engram_operator.builders import BuildSettings, desired
from engram_operator.errors import ResourceError
from tests.unit.chart.rendering import one, render
from tests.unit.operator.documents import model

cel = pytest.importorskip("cel", reason="package common-expression-language is not installed")


def denied(template: dict[str, Any], *, old: dict[str, Any] | None = None) -> list[str]:
    """Messages of the validations that fail, [] also when the policy does not look at the request."""
    spec = one(render(), "ValidatingAdmissionPolicy")["spec"]
    context: dict[str, Any] = {
        "object": {"spec": {"model": {"uri": "hf://a/b"}, "podTemplate": template}},
        "oldObject": {"spec": {"model": {"uri": "hf://a/b"}, "podTemplate": old}} if old is not None else {"spec": {}},
        "request": {"operation": "CREATE" if old is None else "UPDATE"},
        "variables": {},
    }
    if not all(cel.evaluate(condition["expression"], context) for condition in spec["matchConditions"]):
        return []
    for variable in spec["variables"]:
        context["variables"][variable["name"]] = cel.evaluate(variable["expression"], context)
    return [rule["message"] for rule in spec["validations"] if not cel.evaluate(rule["expression"], context)]


def refused_by_operator(template: dict[str, Any]) -> list[str]:
    try:
        desired(model(podTemplate=template), None, BuildSettings("image"))
    except ResourceError as error:
        return error.problems
    return []


def engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def sidecar(**context: Any) -> dict[str, Any]:
    return {"spec": {"initContainers": [{"name": "extra", "image": "i", "securityContext": context}]}}


UNSAFE = {
    "hostNetwork": {"spec": {"hostNetwork": True}},
    "hostPID": {"spec": {"hostPID": True}},
    "hostIPC": {"spec": {"hostIPC": True}},
    "ephemeralContainers": {"spec": {"ephemeralContainers": [{"name": "debug", "image": "i"}]}},
    "hostPath": {"spec": {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}},
    "privileged": engine(securityContext={"privileged": True}),
    "privileged init": sidecar(privileged=True),
    "allowPrivilegeEscalation": engine(securityContext={"allowPrivilegeEscalation": True}),
    "capabilities": sidecar(capabilities={"add": ["NET_ADMIN"], "drop": ["ALL"]}),
    "procMount": engine(securityContext={"procMount": "Unmasked"}),
    "sysctls": {"spec": {"securityContext": {"sysctls": [{"name": "net.core.somaxconn", "value": "1"}]}}},
    "Unconfined": {"spec": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}},
    "root user": engine(securityContext={"runAsUser": 0}),
    "root group": {"spec": {"securityContext": {"runAsGroup": 0}}},
    "root allowed": sidecar(runAsNonRoot=False),
    "hostPort": engine(ports=[{"containerPort": 9000, "hostPort": 9000}]),
}
SAFE = {
    "labels": {"metadata": {"labels": {"a": "b"}}},
    "sidecar": {"spec": {"containers": [{"name": "extra", "image": "i"}]}},
    "volume": {"spec": {"volumes": [{"name": "more", "emptyDir": {}}], "hostNetwork": False}},
    "context": engine(securityContext={"privileged": False, "runAsUser": 1234, "capabilities": {"drop": ["ALL"]}}),
    "port": engine(ports=[{"containerPort": 9000}]),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_what_leaves_the_sandbox_is_denied_by_both(case):
    assert len(denied(UNSAFE[case])) == 1
    assert refused_by_operator(UNSAFE[case])


@pytest.mark.parametrize("case", SAFE)
def test_what_stays_inside_is_taken_by_both(case):
    assert denied(SAFE[case]) == []
    assert refused_by_operator(SAFE[case]) == []


def test_what_was_there_before_can_still_be_labelled_and_deleted():
    unsafe = UNSAFE["hostPath"]
    assert denied(unsafe, old=unsafe) == []
    assert denied(unsafe, old=SAFE["labels"]) != []


def test_it_binds_where_the_operator_works():
    assert "matchResources" not in one(render(), "ValidatingAdmissionPolicyBinding")["spec"]
    spec = one(render({"watchNamespaces": ["a", "b"]}), "ValidatingAdmissionPolicyBinding")["spec"]
    assert spec["matchResources"]["namespaceSelector"]["matchExpressions"][0]["values"] == ["a", "b"]
    assert spec["validationActions"] == ["Deny"]


def test_every_validation_is_tried_by_a_case():
    messages = {message for case in UNSAFE.values() for message in denied(case)}
    rules = one(render(), "ValidatingAdmissionPolicy")["spec"]["validations"]
    untried = {rule["message"] for rule in rules} - messages
    assert untried == {"spec.podTemplate.spec: windowsOptions is not allowed"}
