"""The table of rights says what the chart grants, and covers what is watched."""

from __future__ import annotations

from pathlib import Path

import yaml

from engram_operator.app import WATCHES
from engram_operator.kube.rights import RIGHTS, WATCH

CHART = Path(__file__).parents[4] / "charts" / "engram" / "files" / "rights.yaml"


def test_the_chart_grants_exactly_this() -> None:
    granted: dict[tuple[str, str], set[str]] = {}
    for rule in yaml.safe_load(CHART.read_text()):
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                granted.setdefault((group, resource), set()).update(rule["verbs"])
    assert granted == {key: set(verbs) for key, verbs in RIGHTS.items()}


def test_every_watched_kind_may_be_watched() -> None:
    for watch in WATCHES:
        assert RIGHTS[watch.kind.group, watch.kind.plural] >= WATCH


def test_no_secret_can_be_read() -> None:
    assert RIGHTS["", "secrets"] == {"create"}
