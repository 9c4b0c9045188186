"""The search takes the fastest of what is right; tables of a machine are used for its GPU and Triton version only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_kernels.autotune import linear, search, store
from engram_kernels.autotune.candidates import candidates
from engram_kernels.autotune.driver import H200
from engram_kernels.autotune.search import Case, DeviceLost, OutOfTime, Problem, relative_error
from engram_kernels.linear.kernel import Cooperative, Gemv, Skinny, Stream, parse
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


def problem(clock: Clock, names: Sequence[str], *, baseline: bool = True) -> Problem[str]:
    expected, calls = torch.tensor([1.0, 2.0, 3.0]), iter(range(10**6))

    def run(name: str, rotation: int) -> torch.Tensor:
        clock.current = name
        if name == "crashes":
            raise RuntimeError("out of shared memory")
        output = torch.empty(3)
        output[:2] = expected[:2]
        if name == "wrong":
            output[1] = 2.1
        if name != "unwritten":
            output[2] = 3.0
        if name == "varies":
            output[2] += next(calls) * 1e-6
        return output

    def as_before(rotation: int) -> None:
        clock.current = "baseline"

    case = Case("any", run, lambda: expected, 4, as_before if baseline else None)
    return Problem("op", "key", names, [case], 1e-3, lambda name: {"kind": name or "before"}, "before_us")


def test_the_fastest_of_those_that_are_right() -> None:
    clock = Clock({"baseline": 9.0, "slow": 8.0, "fast": 5.0, "wrong": 1.0, "unwritten": 1.0})
    asked = problem(clock, ["wrong", "slow", "crashes", "unwritten", "fast"])
    found = search.search(asked, clock)
    assert (found.best, found.microseconds, found.before, found.tried) == ("fast", [5.0], [9.0], 2)
    assert search.entry(asked, found) == {"kind": "fast", "us": 5.0, "before_us": 9.0}
    # What is wrong is never timed; the fastest are timed again, side by side with the baseline.
    assert clock.ran == ["baseline", "slow", "fast", "fast", "slow", "baseline"]
    assert [reason.partition(":")[0] for reason in found.refused] == ["wrong", "crashes", "unwritten"]
    assert "out of shared memory" in found.refused[1]
    assert found.wrong == 2


def test_where_nothing_wins_things_stay_as_they_are() -> None:
    clock = Clock({"baseline": 3.0, "slow": 8.0})
    asked = problem(clock, ["slow"])
    found = search.search(asked, clock)
    assert (found.best, found.microseconds) == (None, [3.0])
    assert search.entry(asked, found)["kind"] == "before"
    assert linear.describe(None) == {"kind": "cublas"}


def test_a_result_that_varies_does_not_win() -> None:
    clock = Clock({"baseline": 9.0, "slow": 8.0, "varies": 5.0})
    found = search.search(problem(clock, ["slow", "varies"]), clock)
    assert (found.best, found.wrong) == ("slow", 1)
    assert found.refused == ["varies: another result each time"]


def test_without_a_baseline_the_first_is_the_measure_and_the_fastest_wins() -> None:
    clock = Clock({"today": 4.0, "slow": 8.0, "fast": 3.0})
    found = search.search(problem(clock, ["today", "slow", "fast"], baseline=False), clock)
    assert (found.best, found.microseconds, found.before) == ("fast", [3.0], [4.0])
    same = search.search(problem(clock, ["today", "slow"], baseline=False), clock)
    assert (same.best, same.microseconds, same.before) == ("today", [4.0], [4.0])


def test_a_default_that_is_wrong_here_is_replaced_even_by_something_slower() -> None:
    clock = Clock({"slow": 8.0})
    asked = problem(clock, ["wrong", "slow"], baseline=False)
    found = search.search(asked, clock)
    assert (found.best, found.before) == ("slow", None)
    assert search.entry(asked, found) == {"kind": "slow", "us": 8.0}
    with pytest.raises(ValueError, match="no candidate of op key is right: wrong: wrong by"):
        search.search(problem(clock, ["wrong", "crashes"], baseline=False), clock)
    varies = Clock({"varies": 1.0})
    with pytest.raises(ValueError, match="no candidate of op key repeats its result"):
        search.search(problem(varies, ["varies"], baseline=False), varies)


def test_cases_count_alike_whatever_they_last() -> None:
    """Twice as fast at the short one outweighs a tenth more time at the long one."""
    times = {("today", "short"): 10.0, ("today", "long"): 1000.0, ("other", "short"): 5.0, ("other", "long"): 1100.0}
    running = [("", "")]

    def case(length: str) -> Case[str]:
        def run(name: str, rotation: int) -> torch.Tensor:
            running[0] = (name, length)
            return torch.ones(1)

        return Case(length, run, lambda: torch.ones(1), 2)

    def timer(calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return times[running[0]]

    asked = Problem("op", "key", ["today", "other"], [case("short"), case("long")], 1e-3, lambda name: {"kind": name})
    found = search.search(asked, timer)
    assert search.entry(asked, found) == {
        "kind": "other",
        "us": {"short": 5.0, "long": 1100.0},
        "default_us": {"short": 10.0, "long": 1000.0},
    }


def test_scratch_of_the_candidate_before_is_not_taken_for_a_result() -> None:
    """Memory that comes back from the allocator holds what the last one wrote there."""

    def run(name: str, rotation: int) -> torch.Tensor:
        scratch = torch.empty(3)
        if name == "writes":
            scratch.copy_(torch.tensor([1.0, 2.0, 3.0]))
        return scratch * 1.0

    case = Case("any", run, lambda: torch.tensor([1.0, 2.0, 3.0]), 1)
    asked = Problem("op", "key", ["writes", "forgets"], [case], 1e-3, lambda name: {"kind": name})
    found = search.search(asked, lambda calls: 1.0)
    assert (found.best, found.refused) == ("writes", ["forgets: wrong by inf"])
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_search_ends_in_time_and_a_lost_device_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"baseline": 9.0, "slow": 8.0})
    with pytest.raises(OutOfTime):
        search.search(problem(clock, ["slow"]), clock, lambda: True)

    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match="after crashes: RuntimeError: out of shared memory"):
        search.search(problem(clock, ["crashes", "slow"]), clock)


def test_errors_are_relative_and_nan_is_infinite() -> None:
    assert relative_error(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])) == 1.0
    assert relative_error(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")


@pytest.mark.parametrize("rows", [1, 2, 8, 64, 128, 256, 512])
@pytest.mark.parametrize("gated", [False, True])
def test_candidates_fit_their_shape_and_survive_a_table(rows: int, gated: bool) -> None:
    found = candidates(rows, 4096, 1024, gated)
    assert len(found) > 3
    assert len(set(found)) == len(found)
    for choice in found:
        assert not (gated and isinstance(choice, Skinny))
        if isinstance(choice, Cooperative):
            steps = 1024 // (64 * choice.split)
            assert choice.groups <= choice.stages <= steps
            assert (64 * choice.groups + choice.tokens) * 128 * choice.stages <= 226 << 10
            assert choice.groups * choice.tokens <= 768  # 128 sums a thread and a little more
        else:
            assert rows <= 64
        assert parse(json.loads(json.dumps(linear.describe(choice)))) == choice


@pytest.mark.parametrize("layer", [linear.Layer(96, 512), linear.Layer(48, 256, wide=True)], ids=str)
def test_layers_are_checked_against_fp32(layer: linear.Layer) -> None:
    """With the kernels themselves, in Triton's interpreter."""
    whole = layer.problem(2, layer.operands(torch.device("cpu"), False), H200)
    some = [Gemv(2, layer.k, 4), Gemv(4, layer.k, 8)]
    (case,) = whole.cases
    right = dataclasses.replace(case, baseline=lambda i: None)
    found = search.search(dataclasses.replace(whole, candidates=some, cases=[right]), lambda calls: float(len(calls)))
    assert found.refused == []
    assert found.tried == 2
    off = dataclasses.replace(right, expected=lambda: case.expected() * 1.01)
    assert len(search.search(dataclasses.replace(whole, candidates=some, cases=[off]), lambda calls: 1.0).refused) == 2


def test_small_layers_are_copied_until_no_cache_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "COLD_BYTES", 64 * 32 * 2 * 40)
    cpu = torch.device("cpu")
    assert len(linear.Layer(64, 32).operands(cpu, True)) == 40
    assert len(linear.Layer(2, 32).operands(cpu, True)) == linear.MOST_COPIES
    assert len(linear.Layer(2, 32).operands(cpu, False)) == 1


def test_other_cards_get_nothing_that_only_hopper_can_run() -> None:
    kinds = {type(choice) for choice in candidates(8, 4096, 1024, False)}
    assert {Stream, Cooperative} < kinds
    ampere = candidates(8, 4096, 1024, False, multiprocessors=108, hopper=False)
    assert {type(choice) for choice in ampere} == {Gemv, Skinny}
    assert candidates(256, 4096, 1024, True, multiprocessors=108, hopper=False) == []


def test_a_result_in_fp32_is_asked_of_those_that_widen() -> None:
    head, plain = linear.Layer(4096, 1024, wide=True), linear.Layer(4096, 1024)
    assert not any(isinstance(choice, Cooperative) for choice in head.candidates(8, H200))
    assert any(isinstance(choice, Cooperative) for choice in plain.candidates(8, H200))


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
    assert {file.name for file in path.parent.iterdir()} == {path.name, store.LOCK}
    assert path.stat().st_mode & 0o777 == 0o644
    assert '\n  "rows=1,n=8,k=8": {"kind": "cublas"},\n' in path.read_text()  # a line each, as in the tables that ship


@pytest.mark.usefixtures("imaginary")
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"linear": {}}',
        '{"about": {"gpu": "NVIDIA Imaginary 9", "triton": "3.7.0"}, "linear": {}}',
        '{"about": {"gpu": "NVIDIA Imaginary 9", "triton": "3.6.0"}, "linear": {"rows=1,n=8,k=8": 3}}',
    ],
)
def test_tables_of_others_and_damaged_ones_are_not_used(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / tables.file_name(ABOUT["gpu"], ABOUT["triton"])).write_text(text)
    use_folder(tmp_path)
    assert tuned_or_none("linear", "rows=1,n=8,k=8") is None
    assert "not used" in caplog.text


def add(folder: Path, first: int) -> None:
    for i in range(first, first + 20):
        store.merge(folder, ABOUT, {"linear": {f"rows={i}": {"kind": "cublas"}}})


def test_several_searches_add_to_one_table(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(add, tmp_path, first) for first in (0, 100)]:
            job.result()
    assert len(store.known(tmp_path, ABOUT)["linear"]) == 40


def test_tables_are_written_as_those_that_ship_are() -> None:
    """So that what is added to one of them shows alone."""
    shipped = (resources.files("engram_kernels.tuning") / "nvidia_h200.json").read_text()
    table = json.loads(shipped)
    about = table.pop("about")
    assert store.text(about, table) == shipped


def test_a_table_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.merge(tmp_path, ABOUT, {"linear": {"a": {"kind": "cublas"}}})

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        store.merge(tmp_path, ABOUT, {"linear": {"b": {"kind": "cublas"}}})
    assert {file.name for file in tmp_path.iterdir()} == {path.name, store.LOCK}
    assert list(store.known(tmp_path, ABOUT)["linear"]) == ["a"]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"kind": "rocket"}, "must be gemv, skinny, stream, cooperative or cublas, got 'rocket'"),
        ({}, "got None"),
        ({"kind": "gemv", "bn": 1, "bk": 8}, "warps must be a whole number, got None"),
        ({"kind": "gemv", "bn": 1, "bk": "8", "warps": 1}, "bk must be a whole number, got '8'"),
    ],
)
def test_an_entry_that_names_no_kernel_is_an_error(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(entry)
