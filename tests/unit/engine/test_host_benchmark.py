"""The benchmarks of the engine's host work run, and count what they say they count."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from tests.bench import bench_engine_host, bench_restore_host


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MANY": 4, "PROMPT": 32, "NEW": 16, "CHATS": 2, "TURNS": 4, "ANSWER": 6, "BUDGET": 128}.items():
        monkeypatch.setattr(bench_engine_host, name, value)


@pytest.mark.parametrize("case", ["decode", "text", "streams"])
def test_tokens_have_a_price(case: str) -> None:
    assert bench_engine_host.CASES[case]()["us a token"] > 0


def test_prompts_are_counted_by_step() -> None:
    found = bench_engine_host.CASES["admission"]()
    assert found["chunks"] >= 4
    assert 1 <= found["steps with prompts"] <= 4
    assert found["ms of steps until all have a token"] > 0


@pytest.mark.parametrize(("case", "steps"), [("chats", 1), ("chats-hybrid", 2)])
def test_turns_go_on_together_from_what_the_device_holds(case: str, steps: int) -> None:
    found = bench_engine_host.CASES[case]()
    assert found["steps with prompts"] == steps
    assert 0 < found["ms until handed over"] <= found["ms until all have a token"]


def test_a_turn_comes_back_from_host_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_restore_host", "--tokens", "300"])
    monkeypatch.setattr(bench_restore_host.process, "settle", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bench_restore_host.main()  # raises where a turn was not restored
    assert "300 tokens: GPU tier" in capsys.readouterr().out
