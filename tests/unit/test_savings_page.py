"""docs/savings.md says what the committed results say, and nothing else."""

from __future__ import annotations

import copy
import json

import pytest

from tests.bench import conversation_report as report
from tests.bench.conversation_report import MODES, RESULTS


@pytest.fixture
def result():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_made_from_the_results(result):
    """`python -m tests.bench.bench_conversation --render` writes it."""
    assert report.PAGE.read_text(encoding="utf-8") == report.render(result)
    assert RESULTS.read_text(encoding="utf-8") == report.dump(result)
    assert report.PLOT.read_bytes().startswith(b"\x89PNG")


def test_the_results_are_of_a_dense_and_a_hybrid_model(result):
    for label in ("tiny dense", "tiny hybrid"):
        entry = result[label]
        assert {mode: len(turns) for mode, turns in entry["modes"].items()} == dict.fromkeys(MODES, 50)
        assert set(entry["tiers"]) == {"computed", "gpu", "host", "disk", "store", "s3"}
        for tier, turns in entry["tiers"].items():
            assert {turn["tier"] for turn in turns} == {{"computed": None, "s3": "store"}.get(tier, tier)}


def test_the_server_counts_what_the_model_computed(result):
    assert report.disagreements(result) == []
    broken = copy.deepcopy(result)
    broken["tiny dense"]["modes"]["auto"][2]["counted_tokens"] += 1
    assert len(report.disagreements(broken)) == 1
    assert report.disagreements(broken)[0] in report.render(broken)


def test_no_turn_makes_more_than_five_puts(result):
    for entry in result.values():
        assert max(turn["puts"] for turns in entry["modes"].values() for turn in turns) <= 5


def test_dollars_of_requests():
    turn = {"puts": 3, "lists": 1, "gets": 4, "heads": 1}
    assert report.dollars_per_1000_turns([turn, turn]) == pytest.approx(4 * 0.005 + 5 * 0.0004)


def test_the_plot_is_drawn(result, tmp_path):
    report.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
