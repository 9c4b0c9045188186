"""docs/performance.md says what the committed results say, and nothing else."""

from __future__ import annotations

from tests.bench.performance_parts import PARTS
from tests.bench.performance_report import PAGE, load, page


def test_the_page_is_made_from_the_results() -> None:
    """`python -m tests.bench.performance_report` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_result_names_the_card_and_the_versions() -> None:
    for name in ("decode", "step", "kernels", *PARTS):
        environment = load(name)["environment"]
        assert environment["gpu"] == "NVIDIA H200"
        assert environment["torch"].startswith("2.11")
        assert environment["triton"].startswith("3.6")
        assert environment["date"]
