"""The operations pages say what the chart and the operator do: values, metrics, alerts, links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engram_operator.kube import kinds
from engram_operator.kube.cache import Cache
from engram_operator.kube.metrics import Canary, Metrics
from engram_operator.kube.queue import KeyedQueue
from engram_operator.resources import Schemas
from tests.unit.chart.rendering import CHART, ROOT, one, render

DOCS = ROOT / "docs"
PAGES = ("install", "upgrade", "uninstall", "air-gapped", "tenant-key", "troubleshooting", "operator")
ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def rows(text: str) -> list[list[str]]:
    """Cells of every table row; a `|` inside a code span is none that divides."""
    found = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in found]


def leaves(values: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{where}.{name}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def metric_names(text: str) -> set[str]:
    return set(re.findall(r"\bengram_[a-z_]+", text)) - {"engram_operator"}


async def operator_metrics() -> set[str]:
    """Names as a scrape shows them, without those that every process has."""
    metrics = Metrics()
    metrics.watch_queue(KeyedQueue())
    metrics.watch_cache(Cache(), [kinds.MODELS])
    metrics.watch_canary(Canary())
    found = {(family.name, family.type) for family in metrics.registry.collect()}
    return {name + ("_total" if kind == "counter" else "") for name, kind in found if name.startswith("engram_")}


def test_the_table_of_values_is_values_yaml():
    shown = {row[0].strip("`"): row[1].strip("`") for row in rows(page("install")) if row[0].startswith("`")}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    wanted = {path: json.dumps(value) for path, value in leaves(values)}
    assert {name: shown.get(name) for name in wanted} == wanted
    assert set(shown) - set(wanted) == {"operator", "runtime", "runtime-cpu"}


async def test_the_table_of_metrics_is_complete():
    shown = {row[0].strip("`") for row in rows(page("operator")) if row[0].startswith("`engram_operator_")}
    assert shown == await operator_metrics()


async def test_alerts_ask_for_metrics_that_exist():
    known = await operator_metrics() | metric_names(page("metrics"))
    asked = {name for group in ALERTS for rule in group["rules"] for name in metric_names(rule["expr"])}
    assert asked
    assert asked <= known


def test_every_alert_is_explained_and_installed():
    alerts = [rule["alert"] for group in ALERTS for rule in group["rules"]]
    assert [row[0].strip("`") for row in rows(page("operator")) if row[0].startswith("`Engram")] == alerts
    rule = one(render({"metrics": {"rules": {"enabled": True}}}), "PrometheusRule")
    assert rule["spec"]["groups"] == ALERTS


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)]+)\)", page(name)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        found = (DOCS / path).resolve() if path else DOCS / f"{name}.md"
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in headings}, target


@pytest.mark.parametrize("name", PAGES)
def test_resources_that_are_shown_are_valid(name):
    """Whole documents of our kinds in the pages' YAML and shell examples; `...` stands for a secret."""
    blocks = re.findall(r"```(?:yaml|bash)\n(.*?)```", page(name), re.DOTALL)
    for block in blocks:
        text = block.split("<<EOF\n")[1].split("EOF")[0] if "<<EOF" in block else block
        if "apiVersion: engram.dev" not in text:
            continue
        for document in yaml.safe_load_all(text):
            if document["apiVersion"].startswith("engram.dev/"):
                Schemas.load().admit(document)


def test_the_readme_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert [name for name in PAGES if f"(docs/{name}.md)" not in text] == []


def test_commands_name_targets_that_exist():
    text = page("install") + page("air-gapped")
    targets = set(re.findall(r"TARGET=([a-z-]+)", text)) | set(re.findall(r"build_image\.sh ([a-z-]+)", text))
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", Path(ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert targets
    assert targets <= stages
    arguments = set(re.findall(r"--build-arg ([A-Z_]+)=", text))
    assert arguments <= set(re.findall(r"^ARG ([A-Z_]+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
