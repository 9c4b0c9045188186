"""Every configuration renders, lints and is valid Kubernetes; the default one is kept as a golden file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from engram_operator.resources import Schemas
from tests.unit.chart.rendering import (
    CHART,
    CLUSTER_SCOPED,
    NAMESPACE,
    ROOT,
    is_hook,
    of_kind,
    one,
    render,
    texts,
    values_files,
)

GOLDEN = Path(__file__).parent / "golden"
CASES = values_files()
# The newest that the validator knows, and the oldest that the chart takes.
KUBERNETES = ("1.37", "1.30")
SCHEMAS = Schemas.load()
PROMETHEUS = "monitoring.coreos.com/"


def pod_specs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    specs = [obj["spec"]["template"]["spec"] for obj in objects if obj["kind"] in ("Deployment", "Job")]
    return specs + [obj["spec"] for obj in objects if obj["kind"] == "Pod"]


def test_the_matrix_has_what_it_says():
    assert set(CASES) >= {"default", "namespaced", "watched", "available", "bare"}


@pytest.mark.parametrize("case", CASES)
def test_lints(case):
    found = helm_python.lint(CHART, CASES[case], namespace=NAMESPACE, strict=True)
    assert found["errors"] == []
    assert [entry["error"] for entry in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", CASES)
def test_is_valid_kubernetes(case, version):
    validated = 0
    for obj in render(CASES[case]):
        if obj["apiVersion"].startswith("engram.dev/"):
            SCHEMAS.admit(obj)
        elif not obj["apiVersion"].startswith(PROMETHEUS):
            kubernetes_validate.validate(obj, version, strict=True)
            validated += 1
    assert validated > 0


@pytest.mark.parametrize("case", CASES)
def test_objects_say_where_they_live(case):
    """A namespace on each namespaced object, none on the others; no two of one kind and name."""
    objects = render(CASES[case])
    for obj in objects:
        assert ("namespace" in obj["metadata"]) is (obj["kind"] not in CLUSTER_SCOPED), obj["metadata"]["name"]
    identities = [(obj["kind"], obj["metadata"].get("namespace"), obj["metadata"]["name"]) for obj in objects]
    assert len(identities) == len(set(identities))


@pytest.mark.parametrize("case", CASES)
def test_pods_are_restricted(case):
    """What the `restricted` Pod Security Standard asks for, a read-only root and a group of our own."""
    specs = pod_specs(render(CASES[case]))
    assert specs
    for spec in specs:
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert (pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]) == (10001, 10001, 10001)
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "limits" in container["resources"]
            assert "sh" not in container["command"][0]


def test_default_values_render_as_kept():
    """ENGRAM_GOLDEN=write renews the file; the definitions are compared with crds/ instead."""
    rendered = [obj for obj in render() if obj["kind"] != "CustomResourceDefinition"]
    text = yaml.safe_dump_all(rendered, sort_keys=False, width=120)
    text = re.sub(r"(engram.dev/crds: )[0-9a-f]+", r"\1HASHES", text)
    path = GOLDEN / "default.yaml"
    if os.environ.get("ENGRAM_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "crds").glob("*.yaml")), ids=lambda path: path.stem)
def test_definitions_are_those_of_crds(path):
    """The chart cannot reach outside its folder: cp crds/*.yaml charts/engram/files/crds/"""
    assert (CHART / "files" / "crds" / path.name).read_text() == path.read_text()
    wanted = yaml.safe_load(path.read_text())
    assert one(render(), "CustomResourceDefinition", wanted["metadata"]["name"]) == wanted


def test_definitions_stay_when_the_release_goes():
    found = of_kind(render(), "CustomResourceDefinition")
    assert len(found) == len(list((ROOT / "crds").glob("*.yaml"))) == len(list((CHART / "files" / "crds").iterdir()))
    assert {obj["metadata"]["annotations"]["helm.sh/resource-policy"] for obj in found} == {"keep"}


def test_a_namespaced_installation_needs_no_right_on_the_cluster():
    assert [obj for obj in render(CASES["namespaced"]) if obj["kind"] in CLUSTER_SCOPED] == []


def test_the_operator_restarts_with_its_definitions():
    """The annotation changes with each file, and is short enough to read."""
    template = one(render(), "Deployment")["spec"]["template"]
    assert len(template["metadata"]["annotations"]["engram.dev/crds"]) == 8 * len(list((ROOT / "crds").glob("*.yaml")))


def test_two_releases_share_no_name_on_the_cluster():
    first, second = (
        {obj["metadata"]["name"] for obj in render(namespace=ns) if obj["kind"] in CLUSTER_SCOPED} for ns in "ab"
    )
    assert {name for name in first & second if not name.endswith(".engram.dev")} == set()


def test_the_deployments_selector_finds_its_pods_alone():
    """Selectors are immutable: nothing that a value changes may be in them. Hooks and tests are not the operator."""
    for case in ("default", "available"):
        objects = render(CASES[case])
        spec = one(objects, "Deployment")["spec"]
        selector = spec["selector"]["matchLabels"]
        assert selector.items() <= spec["template"]["metadata"]["labels"].items()
        assert set(selector) == {f"app.kubernetes.io/{part}" for part in ("name", "instance", "component")}
        for obj in objects:
            if is_hook(obj):
                assert not selector.items() <= obj["metadata"].get("labels", {}).items()


def test_a_budget_only_above_one_replica():
    assert of_kind(render(), "PodDisruptionBudget") == []
    budget = one(render({"replicaCount": 2}), "PodDisruptionBudget")
    deployment = one(render({"replicaCount": 2}), "Deployment")
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]


def test_the_token_for_engines_is_good_for_nothing_else():
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "engine-token"]
    (source,) = volume["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "engram.dev"
    (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "engine-token"]
    env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert f"{mount['mountPath']}/{source['serviceAccountToken']['path']}" in env.values()


def test_images_by_tag_or_digest():
    container = one(render(), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container["image"] == f"engram-operator:{version}"
    objects = render(CASES["available"])
    container = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"].startswith("registry.example/engram/operator@sha256:")
    assert one(objects, "Pod")["spec"]["containers"][0]["image"] == container["image"]


def test_the_notes_show_a_model_that_the_schema_takes():
    notes = texts()["templates/NOTES.txt"]
    shown = notes.split("<<EOF\n")[1].split("EOF")[0]
    (document,) = yaml.safe_load_all(shown)
    assert SCHEMAS.admit(document)["spec"]["model"]["uri"].startswith("hf://")
    assert "helm test" not in notes
    assert "helm test engram" in texts({"helmTest": {"model": "chat"}})["templates/NOTES.txt"]


@pytest.mark.parametrize("case", CASES)
def test_the_operator_leaves_a_lost_node_at_once(case):
    """With Kubernetes' own five minutes, a model beside the operator would wait that long to be replaced."""
    for spec in pod_specs(render(CASES[case])):
        evicted = {
            entry["key"]: entry["tolerationSeconds"] for entry in spec["tolerations"] if "tolerationSeconds" in entry
        }
        assert evicted == {"node.kubernetes.io/not-ready": 10, "node.kubernetes.io/unreachable": 10}
