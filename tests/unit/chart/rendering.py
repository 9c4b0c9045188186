"""The chart rendered by Helm's own library, without a cluster and without Go."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "engram"
NAMESPACE = "engram-system"
RELEASE = "engram"

Object = dict[str, Any]

# Kinds without a namespace that the chart may make.
CLUSTER_SCOPED = frozenset(
    {
        "ClusterRole",
        "ClusterRoleBinding",
        "CustomResourceDefinition",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
)


def values_files() -> dict[str, Object]:
    """The configurations that the chart is tested with, by name: charts/engram/ci/NAME-values.yaml."""
    files = sorted((CHART / "ci").glob("*-values.yaml"))
    return {path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text()) or {} for path in files}


def texts(values: Object | None = None, *, namespace: str = NAMESPACE) -> dict[str, str]:
    """Template path, from the chart's folder on, to what it rendered."""
    return _texts(json.dumps(values or {}), namespace)


def render(values: Object | None = None, *, namespace: str = NAMESPACE) -> list[Object]:
    """All objects, in the order of the template files. Not to be changed: tests share them."""
    return _objects(json.dumps(values or {}), namespace)


@cache
def _texts(values: str, namespace: str) -> dict[str, str]:
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(json.loads(values), name=RELEASE, namespace=namespace)
    return {path.removeprefix("engram/"): text for path, text in rendered.items()}


@cache
def _objects(values: str, namespace: str) -> list[Object]:
    found = []
    for path, text in sorted(_texts(values, namespace).items()):
        if not path.endswith("NOTES.txt"):
            found += [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]
    return found


def of_kind(objects: list[Object], kind: str, name: str | None = None) -> list[Object]:
    return [obj for obj in objects if obj["kind"] == kind and name in (None, obj["metadata"]["name"])]


def one(objects: list[Object], kind: str, name: str | None = None) -> Object:
    found = of_kind(objects, kind, name)
    assert len(found) == 1, [(obj["kind"], obj["metadata"]["name"]) for obj in objects]
    return found[0]


def is_hook(obj: Object) -> bool:
    return "helm.sh/hook" in (obj["metadata"].get("annotations") or {})
