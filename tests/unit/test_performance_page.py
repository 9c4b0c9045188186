"""docs/performance.md says what the committed results say, and nothing else."""

from __future__ import annotations

from tests.bench.performance_parts import PARTS
from tests.bench.performance_report import PAGE, load, page, render


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


def test_a_row_shows_what_several_steps_a_launch_take_or_that_they_were_not_measured() -> None:
    decode = load("decode")
    row = {key: value for key, value in decode["results"][0].items() if key != "launch4_tpot_ms"}
    rows = [row, {**row, "launch4_tpot_ms": 0.123}]
    lines = render({**decode, "results": rows}, load("step"), load("kernels")).splitlines()
    head = next(number for number, line in enumerate(lines) if "| 4 a launch |" in line)
    column = lines[head].split(" | ").index("4 a launch")
    assert [lines[head + at].split(" | ")[column] for at in (2, 3)] == ["-", "0.123"]
