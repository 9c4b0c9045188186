"""podTemplate: what it may change, how it merges, and what it may not do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_operator.builders import BuildSettings, desired
from engram_operator.errors import ResourceError
from tests.unit.operator.documents import model

SETTINGS = BuildSettings(image="engram-runtime:test")


def template(**overlay: Any) -> dict[str, Any]:
    objects = desired(model(podTemplate=overlay), None, SETTINGS)
    found: dict[str, Any] = next(item for item in objects if item["kind"] == "StatefulSet")["spec"]["template"]
    return found


def pod(**spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = template(spec=spec)["spec"]
    return found


WORDS = """
    metadata spec labels containers initContainers volumes name engine model env ports securityContext capabilities
    drop add hostPort seccompProfile startupProbe volumeMounts httpGet tolerations
"""
words = st.sampled_from(WORDS.split())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
named = st.fixed_dictionaries(
    {"name": words}, optional={"env": json_values, "securityContext": json_values, "ports": json_values}
)
pod_specs = st.dictionaries(words, json_values | st.lists(named, max_size=3), max_size=3)


def test_metadata_is_added() -> None:
    found = template(metadata={"labels": {"team": "a"}, "annotations": {"x": "y"}})["metadata"]
    plain = template()["metadata"]
    assert found["labels"] == {**plain["labels"], "team": "a"}
    assert found["annotations"] == {**plain["annotations"], "x": "y"}


def test_containers_merge_by_name_and_their_lists_by_key() -> None:
    plain = pod()
    found = pod(
        containers=[
            {
                "name": "engine",
                "command": ["other"],
                "env": [{"name": "HOME", "value": "/x"}, {"name": "NEW", "value": "1"}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/tmp", "readOnly": True}],
                "startupProbe": {"periodSeconds": 9, "httpGet": None, "exec": {"command": ["true"]}},
            }
        ]
    )
    before, after = plain["containers"][0], found["containers"][0]
    assert after["command"] == ["other"]
    assert after["args"] == before["args"]
    env = {entry["name"]: entry.get("value") for entry in after["env"]}
    assert (env["HOME"], env["NEW"], len(after["env"])) == ("/x", "1", len(before["env"]) + 1)
    assert after["volumeMounts"] == [{**before["volumeMounts"][0], "readOnly": True}, *before["volumeMounts"][1:]]
    assert after["startupProbe"] == {
        **{key: value for key, value in before["startupProbe"].items() if key != "httpGet"},
        "periodSeconds": 9,
        "exec": {"command": ["true"]},
    }


def test_a_volume_is_replaced_when_its_source_is_another() -> None:
    volumes = {volume["name"]: volume for volume in pod(volumes=[{"name": "cache", "ephemeral": {"x": 1}}])["volumes"]}
    assert volumes["cache"] == {"name": "cache", "ephemeral": {"x": 1}}


def test_tolerations_are_appended_and_other_lists_replaced() -> None:
    extra = {"key": "mine", "operator": "Exists"}
    assert pod(tolerations=[extra])["tolerations"] == [*pod()["tolerations"], extra]
    found = pod(dnsConfig={"nameservers": ["10.0.0.1"]}, terminationGracePeriodSeconds=5)
    assert (found["dnsConfig"], found["terminationGracePeriodSeconds"]) == ({"nameservers": ["10.0.0.1"]}, 5)


def test_a_sidecar_is_restricted_as_our_own_containers_are() -> None:
    found = pod(containers=[{"name": "sidecar", "image": "x", "securityContext": {"runAsUser": 65534}}])
    sidecar = found["containers"][1]
    assert sidecar["securityContext"] == {**found["containers"][0]["securityContext"], "runAsUser": 65534}


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"spec": {"hostNetwork": True}}, "spec.podTemplate.spec.hostNetwork: not allowed"),
        ({"spec": {"hostPID": True}}, "spec.podTemplate.spec.hostPID: not allowed"),
        ({"spec": {"hostIPC": True}}, "spec.podTemplate.spec.hostIPC: not allowed"),
        ({"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}}, "hostPath: not allowed (v)"),
        ({"spec": {"volumes": [{"name": "cache", "hostPath": {"path": "/"}}]}}, "hostPath: not allowed (cache)"),
        (
            {"spec": {"securityContext": {"runAsUser": 0}}},
            "spec.podTemplate.spec.securityContext.runAsUser: must not be 0",
        ),
        ({"spec": {"securityContext": {"runAsNonRoot": False}}}, "securityContext.runAsNonRoot: must be true"),
        ({"spec": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}}, "must not be Unconfined"),
        ({"spec": {"securityContext": {"sysctls": [{"name": "a", "value": "1"}]}}}, "sysctls: not allowed"),
        ({"spec": {"ephemeralContainers": [{"name": "x"}]}}, "spec.podTemplate.spec.ephemeralContainers: not allowed"),
        ({"spec": {"nodeName": "n"}}, "spec.podTemplate.spec.nodeName: may not be set"),
        ({"spec": {"restartPolicy": "Never"}}, "spec.podTemplate.spec.restartPolicy: may not be set"),
        ({"spec": {"serviceAccountName": "x"}}, "serviceAccountName: may not be set; use spec.serviceAccountName"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.podTemplate.spec.containers[0].name: required"),
        ({"spec": {"containers": {"engine": {}}}}, "spec.podTemplate.spec.containers: must be a list of objects"),
        ({"spec": {"containers": [{"name": "engine", "args": []}]}}, "containers[0].args: use spec.engine.args"),
        (
            {"metadata": {"labels": {"app.kubernetes.io/instance": "x"}}},
            "app.kubernetes.io/instance: is set by the operator",
        ),
        ({"metadata": {"labels": {"a": 1}}}, "spec.podTemplate.metadata.labels: must map strings to strings"),
        ({"metadata": {"name": "x"}}, "spec.podTemplate.metadata.name: may not be set"),
        ({"sepc": {}}, "spec.podTemplate.sepc: may not be set; did you mean spec?"),
        ({"spec": []}, "spec.podTemplate.spec: must be an object"),
    ],
)
def test_refused(overlay: dict[str, Any], message: str) -> None:
    with pytest.raises(ResourceError) as caught:
        template(**overlay)
    assert message in str(caught.value)


@pytest.mark.parametrize("part", ["containers", "initContainers"])
@pytest.mark.parametrize("name", ["engine", "model", "other"])
@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"privileged": True}, "privileged: not allowed"),
        ({"allowPrivilegeEscalation": True}, "allowPrivilegeEscalation: not allowed"),
        ({"capabilities": {"add": ["SYS_ADMIN"]}}, "capabilities.add: not allowed"),
        ({"capabilities": {"drop": ["NET_RAW"]}}, "capabilities.drop: must hold ALL"),
        ({"procMount": "Unmasked"}, "procMount: not allowed"),
        ({"runAsUser": 0}, "runAsUser: must not be 0"),
    ],
)
def test_no_container_leaves_the_sandbox(part: str, name: str, context: dict[str, Any], message: str) -> None:
    with pytest.raises(ResourceError) as caught:
        pod(**{part: [{"name": name, "image": "x", "securityContext": context}]})
    assert f"spec.podTemplate.spec.{part}[{name}].securityContext.{message}" in caught.value.problems


@given(st.fixed_dictionaries({"spec": pod_specs}) | st.dictionaries(words, json_values, max_size=3))
def test_whatever_is_written_is_merged_or_refused(overlay: dict[str, Any]) -> None:
    problems: tuple[str, ...] = ()
    try:
        found = template(**overlay)
    except ResourceError as error:
        problems = error.problems
    else:
        assert "securityContext" in found["spec"]["containers"][0]
    assert all(problem.startswith("spec.podTemplate") for problem in problems)


def test_no_host_port() -> None:
    with pytest.raises(ResourceError, match=r"containers\[engine\]\.ports\[2\]\.hostPort: not allowed"):
        pod(containers=[{"name": "engine", "ports": [{"containerPort": 9000, "hostPort": 9000}]}])
