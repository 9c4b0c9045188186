"""The search takes the fastest of what is right; tables of a machine are used for its GPU and Triton version only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_kernels.autotune import linear, search, store
from engram_kernels.autotune.candidates import candidates
from engram_kernels.autotune.search import Problem, relative_error
from engram_kernels.linear.kernel import Gemv, Skinny, parse
from engram_kernels.tuning import tables, tuned_or_none, use_folder

ABOUT = {"gpu": "NVIDIA Imaginary 9", "triton": "3.6.0", "torch": "2.11"}


class Clock:
    """A timer that runs every call and gives each problem's calls the time that was agreed on."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times, self.ran = times, list[str]()
        self.current = ""

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        self.ran.append(self.current)
        return self.times[self.current]


def problem(clock: Clock, names: Sequence[str]) -> Problem[str]:
    expected, output = torch.tensor([1.0, 2.0, 3.0]), torch.empty(3)

    def run(name: str, rotation: int) -> None:
        clock.current = name
        if name == "crashes":
            raise RuntimeError("out of shared memory")
        output.copy_(expected)
        if name == "wrong":
            output[1] = 2.1
        if name == "unwritten":
            output[2] = float("nan")

    def baseline(rotation: int) -> None:
        clock.current = "baseline"

    return Problem("op", "key", names, run, baseline, output, expected, 1e-3, 4, lambda name: {"kind": name})


def test_the_fastest_of_those_that_are_right() -> None:
    clock = Clock({"baseline": 9.0, "slow": 8.0, "fast": 5.0, "wrong": 1.0, "unwritten": 1.0})
    found = search.search(problem(clock, ["wrong", "slow", "crashes", "unwritten", "fast"]), clock)
    assert (found.best, found.microseconds, found.baseline_microseconds, found.tried) == ("fast", 5.0, 9.0, 2)
    assert clock.ran == ["baseline", "slow", "fast"]  # what is wrong is never timed
    assert [reason.partition(":")[0] for reason in found.refused] == ["wrong", "crashes", "unwritten"]
    assert "out of shared memory" in found.refused[1]


def test_where_nothing_wins_things_stay_as_they_are() -> None:
    clock = Clock({"baseline": 3.0, "slow": 8.0})
    found = search.search(problem(clock, ["slow"]), clock)
    assert (found.best, found.microseconds) == (None, 3.0)
    assert linear.describe(None) == {"kind": "cublas"}


def test_errors_are_relative_and_nan_is_infinite() -> None:
    assert relative_error(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])) == 1.0
    assert relative_error(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_candidates_fit_their_shape_and_survive_a_table(rows: int, gated: bool) -> None:
    found = candidates(rows, 4096, 1024, gated)
    assert len(found) > 3
    assert len(set(found)) == len(found)
    for choice in found:
        assert not (gated and isinstance(choice, Skinny))
        assert parse(json.loads(json.dumps(linear.describe(choice)))) == choice


@pytest.mark.parametrize("layer", [linear.Layer(96, 512), linear.Layer(48, 256, wide=True)], ids=str)
def test_layers_are_checked_against_fp32(layer: linear.Layer) -> None:
    """With the kernels themselves, in Triton's interpreter."""
    weights = linear.weights_of(layer, torch.device("cpu"), 1 << 10)
    whole = linear.problem(layer, 2, weights)
    some = [Gemv(2, layer.k, 4), Gemv(4, layer.k, 8)]
    found = search.search(
        dataclasses.replace(whole, candidates=some, baseline=lambda i: None), lambda calls: float(len(calls))
    )
    assert found.refused == []
    assert found.tried == 2
    broken = dataclasses.replace(whole, candidates=some, expected=whole.expected * 1.01, baseline=lambda i: None)
    assert len(search.search(broken, lambda calls: 1.0).refused) == 2


@pytest.fixture
def imaginary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that no shipped table knows."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: ABOUT["gpu"])
    monkeypatch.setattr(tables, "version", lambda name: ABOUT["triton"])
    yield
    use_folder(None)


@pytest.mark.usefixtures("imaginary")
def test_what_was_found_is_used_and_what_is_found_later_wins(tmp_path: Path) -> None:
    first: dict[str, Any] = {"linear": {"rows=1,n=8,k=8": {"kind": "cublas"}, "rows=2,n=8,k=8": {"kind": "cublas"}}}
    path = store.merge(tmp_path / "tuning", ABOUT, first)
    assert path.name == "nvidia_imaginary_9-triton-3.6.0.json"
    second = {"rows=2,n=8,k=8": {"kind": "gemv", "bn": 1, "bk": 8, "warps": 1}}
    store.merge(tmp_path / "tuning", ABOUT, {"linear": second})
    assert tuned_or_none("linear", "rows=1,n=8,k=8") is None
    use_folder(tmp_path / "tuning")
    assert tuned_or_none("linear", "rows=1,n=8,k=8") == {"kind": "cublas"}
    assert tuned_or_none("linear", "rows=2,n=8,k=8") == second["rows=2,n=8,k=8"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.usefixtures("imaginary")
@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"linear": {}}', '{"about": {"gpu": "NVIDIA Imaginary 9", "triton": "3.7.0"}, "linear": {}}'],
)
def test_tables_of_others_and_damaged_ones_are_not_used(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / tables.file_name(ABOUT["gpu"], ABOUT["triton"])).write_text(text)
    use_folder(tmp_path)
    assert tuned_or_none("linear", "rows=1,n=8,k=8") is None
    assert "not used" in caplog.text
