"""Values: a typo is an error, and so is what cannot work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from tests.unit.chart.rendering import CHART, render, values_files

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def parts(schema: dict[str, Any], where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield where, schema
    for name, below in schema.get("properties", {}).items():
        yield from parts(below, f"{where}.{name}".lstrip("."))


@pytest.mark.parametrize("where", [where for where, part in parts(SCHEMA) if part.get("properties")])
def test_a_typo_is_refused_at_every_level(where):
    values: dict[str, Any] = {"replicaCoutn": 2}
    for name in reversed(where.split(".") if where else []):
        values = {name: values}
    with pytest.raises(helm_python.HelmError, match="replicaCoutn"):
        render(values)


def test_the_schema_knows_every_value_and_no_other():
    """`global` is Helm's own: a chart above this one may set it."""

    def leaves(schema: dict[str, Any], values: Any, where: str) -> None:
        known = schema.get("properties")
        if known is None:
            return
        assert set(known) - {"global"} == set(values), where
        for name, below in known.items():
            if name != "global":
                leaves(below, values[name], f"{where}.{name}")

    leaves(SCHEMA, DEFAULTS, "values")


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"replicaCount": 0}, "replicaCount"),
        ({"replicaCount": "two"}, "replicaCount"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"watchNamespaces": ["team-a", "team-a"]}, "watchNamespaces"),
        ({"watchNamespaces": ["Team A"]}, "watchNamespaces"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"image": {"repository": ""}}, "repository"),
        ({"image": {"repository": "a@sha256:1"}}, "repository"),
        ({"imagePullSecrets": ["registry"]}, "imagePullSecrets"),
        ({"upgrades": {"rollModels": "Never"}}, "rollModels"),
        ({"logLevel": "loud"}, "logLevel"),
        ({"metrics": {"podMonitor": {"interval": "30"}}}, "interval"),
        ({"cluster": {"tokenIssuer": "kubernetes"}}, "tokenIssuer"),
        ({"helmTest": {"create": {"uri": "http://models/tiny"}}}, "uri"),
        ({"helmTest": {"model": "a", "create": {"uri": "file:///tiny"}}}, "not both"),
        ({"helmTest": {"create": {"uri": "file:///tiny"}}, "watchNamespaces": ["team-a"]}, "does not watch"),
        ({"leaderElection": {"renewDeadlineSeconds": 15}}, "renewDeadlineSeconds"),
        ({"leaderElection": {"retryPeriodSeconds": 10}}, "retryPeriodSeconds"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
    ],
)
def test_what_cannot_work_is_refused(values, names):
    with pytest.raises(helm_python.HelmError, match=names):
        render(values)


def test_the_matrix_sets_every_value_somewhere():
    """Otherwise a template that forgot a value would be noticed by nobody."""

    def paths(values: Any, where: str = "") -> Iterator[str]:
        if isinstance(values, dict) and values:
            for name, below in values.items():
                yield from paths(below, f"{where}.{name}".lstrip("."))
        else:
            yield where

    maps = {where for where, part in parts(SCHEMA) if not part.get("properties")}
    used = {path for values in values_files().values() for path in paths(values)}
    unset = {where for where in maps if not any(path == where or path.startswith(f"{where}.") for path in used)}
    assert unset == {
        "global",
        "image.tag",
        "engine.image.digest",
        "resources.limits",
        "resources.requests",
        "uninstall.timeoutSeconds",
    }
