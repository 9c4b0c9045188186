"""A run over a model: kept at once, taken up again, ended in time; on an imagined GPU with an imagined clock."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_kernels.autotune import ahead, driver, store
from engram_kernels.autotune.driver import H200, Card, Session
from engram_kernels.autotune.search import Case, DeviceLost, Problem
from tests.support import patience

ABOUT = {"gpu": "NVIDIA Imaginary 9", "triton": "3.6.0", "torch": "2.11"}
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Toy:
    """Candidates are their own times; a negative one computes something else, 0 does not compile."""

    op: str
    sizes: tuple[int, ...]
    times: tuple[int, ...] = (5, 3, -1, 0)
    hopper_only: bool = False
    broken: str = ""

    def key(self, size: int) -> str:
        return f"size={size}"

    def candidates(self, size: int, card: Card) -> Sequence[int]:
        return self.times

    def pointless(self, card: Card) -> str | None:
        return "nothing of it here" if self.hopper_only and not card.hopper else None

    def operands(self, device: torch.device, cold: bool) -> torch.Tensor:
        if self.broken == "operands":
            raise RuntimeError("CUDA out of memory")
        return torch.ones(4, device=device)

    def problem(self, size: int, operands: torch.Tensor, card: Card) -> Problem[int]:
        if self.broken == "problem":
            raise RuntimeError("CUDA out of memory")

        def run(choice: int, i: int) -> torch.Tensor:
            if not choice:
                raise RuntimeError("out of resource: shared memory")
            RAN.append((self.op, size, choice))
            return operands * (2.0 if choice < 0 else 1.0)

        case = Case(self.key(size), run, lambda: torch.ones(4), 1)
        return Problem(self.op, self.key(size), self.times, [case], 1e-3, lambda choice: {"bm": int(choice or 0)})


RAN: list[tuple[str, int, int]] = []


def timer(calls: Sequence[Callable[[], object]]) -> float:
    calls[0]()
    return float(RAN[-1][2])


@dataclasses.dataclass
class Clock:
    """Advances by `step` each time it is asked."""

    step: float = 0.0
    now: float = 100.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def session(folder: Path, said: list[str], **changes: Any) -> Session:
    RAN.clear()
    plain = Session(H200, CPU, timer, folder, ABOUT, 60.0, said.append, clock=Clock())
    return dataclasses.replace(plain, **changes)


def test_every_key_is_kept_and_told(tmp_path: Path) -> None:
    said: list[str] = []
    summary = driver.tune([Toy("one", (1, 2)), Toy("two", (1,))], session(tmp_path, said))
    assert store.known(tmp_path, ABOUT) == {
        "one": {f"size={size}": {"bm": 3, "us": 3.0, "default_us": 5.0} for size in (1, 2)},
        "two": {"size=1": {"bm": 3, "us": 3.0, "default_us": 5.0}},
    }
    assert dataclasses.astuple(summary) == (3, 0, 0, 0, 6, 6, 3)
    assert str(summary) == (
        "keys: 3 found, 0 in the table before, 0 left, 0 failed; candidates: 6 tried, 6 refused (3 wrong)"
    )
    assert said[0] == "[1/3, 0 s] one size=1: bm=3 us=3.0 default_us=5.0; 2 tried, 2 refused (1 wrong)"
    assert said[1:3] == [
        "  refused: -1: wrong by 1.0e+00",
        "  refused: 0: RuntimeError: out of resource: shared memory",
    ]


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    said: list[str] = []
    driver.tune([Toy("one", (1, 4))], session(tmp_path, said))
    again = driver.tune([Toy("one", (1, 2, 4))], session(tmp_path, said))
    assert {size for _, size, _ in RAN} == {2}
    assert (again.found, again.kept) == (1, 2)
    forced = driver.tune([Toy("one", (1, 2, 4))], session(tmp_path, said, force=True))
    assert {size for _, size, _ in RAN} == {1, 2, 4}
    assert (forced.found, forced.kept) == (3, 0)


def test_what_was_found_for_another_gpu_or_triton_does_not_count(tmp_path: Path) -> None:
    driver.tune([Toy("one", (1,))], session(tmp_path, []))
    for other in ({"gpu": "NVIDIA Imaginary 10"}, {"triton": "3.7.0"}):
        summary = driver.tune([Toy("one", (1,))], session(tmp_path, [], about={**ABOUT, **other}))
        assert (summary.found, summary.kept) == (1, 0)
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_run_ends_in_time_and_keeps_whole_keys_only(tmp_path: Path) -> None:
    said: list[str] = []
    summary = driver.tune([Toy("one", (1, 2, 4)), Toy("two", (1,))], session(tmp_path, said, clock=Clock(5.0)))
    assert 0 < summary.found < 4
    assert summary.found + summary.left == 4
    assert len(store.known(tmp_path, ABOUT)["one"]) == summary.found
    assert said[-1].endswith("out of time")
    late: list[str] = []
    none = driver.tune([Toy("three", (1,))], session(tmp_path, late, seconds=-1.0))
    assert (none.found, none.left, RAN) == (0, 1, [])


def test_a_key_that_cannot_be_measured_does_not_stop_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    bad = [Toy("big", (1, 2), broken="operands"), Toy("bigger", (1,), broken="problem"), Toy("wrong", (1,), (-1, 0))]
    summary = driver.tune([*bad, Toy("one", (1,))], session(tmp_path, said))
    assert (summary.found, summary.failed, summary.left) == (1, 4, 0)
    assert all("failed: RuntimeError: CUDA out of memory" in line for line in said[:3])
    assert "failed: ValueError: no candidate of wrong size=1 is right" in said[3]
    assert list(store.known(tmp_path, ABOUT)) == ["one"]


def test_a_lost_device_stops_the_run_and_what_was_found_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(refusal: str) -> None:
        raise DeviceLost(refusal)

    work = [Toy("one", (1,), (5, 3)), Toy("two", (1,)), Toy("three", (1,))]
    monkeypatch.setattr("engram_kernels.autotune.search.check_device", lost)
    with pytest.raises(DeviceLost, match="0: RuntimeError"):
        driver.tune(work, session(tmp_path, []))
    assert list(store.known(tmp_path, ABOUT)) == ["one"]


def test_a_damaged_table_is_named_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "nvidia_imaginary_9-triton-3.6.0.json"
    path.write_text("{")
    driver.tune([Toy("one", (1,))], session(tmp_path, []))
    assert "not used" in caplog.text
    assert json.loads(path.read_text())["about"] == ABOUT


def test_the_outline_counts_keys_and_candidates(tmp_path: Path) -> None:
    work = [Toy("one", (1, 2, 4)), Toy("one", (8,), (1,)), Toy("two", (1, 2), hopper_only=True)]
    assert driver.outline(work, H200, {"one": {"size=2": {}}}) == [
        "one: 3 keys, 9 candidates, 1 in the table",
        "two: 2 keys, 8 candidates",
        "all: 17 candidates",
    ]
    ampere = Card(108, (8, 0))
    assert driver.outline(work, ampere, {})[-3:] == [
        "two: 0 keys, 0 candidates",
        "  nothing of it here",
        "all: 13 candidates",
    ]
    summary = driver.tune(work, session(tmp_path, [], card=ampere))
    assert (summary.found, summary.left, summary.kept) == (4, 0, 0)
    assert list(store.known(tmp_path, ABOUT)) == ["one"]


def test_candidates_are_compiled_ahead_once_each(tmp_path: Path) -> None:
    """In threads here; on a GPU these are processes."""
    said: list[str] = []
    work = [Toy("one", (1, 2))]
    with ThreadPoolExecutor(3) as pool, ahead.Workers(3, CPU, said.append, pool) as workers:
        running = session(tmp_path, said, ahead=workers)
        workers(work[0], (1, 2), H200, patience.SECONDS)
        assert sorted(RAN) == sorted(("one", size, choice) for size in (1, 2) for choice in (5, 3, -1))
        assert said[-1].startswith("one: 6 candidates compiled ahead in")
        driver.tune(work, running)
    assert sum(line.startswith("one: 6 candidates") for line in said) == 2
    assert list(store.known(tmp_path, ABOUT)["one"]) == ["size=1", "size=2"]


def test_the_same_candidate_of_several_sizes_is_compiled_by_one_process() -> None:
    shares = []
    for part in range(2):
        RAN.clear()
        until = time.time() + patience.SECONDS
        ahead.share(Toy("one", (1, 2), tuple(range(1, 30))), (1, 2), H200, "cpu", part, 2, until)
        shares.append([(size, choice) for _, size, choice in RAN])
    assert sorted(shares[0] + shares[1]) == [(size, choice) for size in (1, 2) for choice in range(1, 30)]
    assert {choice for _, choice in shares[0]}.isdisjoint(choice for _, choice in shares[1])
    RAN.clear()
    assert ahead.share(Toy("one", (1,)), (1,), H200, "cpu", 0, 1, time.time() - 1) == 0
    assert RAN == []


def test_a_share_that_fails_is_left_to_the_search(tmp_path: Path) -> None:
    class Dead:
        def submit(self, *job: object) -> Future[int]:
            future: Future[int] = Future()
            future.set_exception(FAILURES.pop(0))
            return future

        def shutdown(self, **how: object) -> None:
            raise AssertionError("a broken pool is left alone")

    FAILURES = [RuntimeError("CUDA out of memory"), BrokenProcessPool("terminated abruptly")]
    said: list[str] = []
    with ahead.Workers(1, CPU, said.append, Dead()) as workers:  # type: ignore[arg-type]
        for _ in range(3):
            workers(Toy("one", (1,)), (1,), H200, 30.0)
    assert "a share is left to the search: RuntimeError: CUDA out of memory" in said[0]
    assert "given up: terminated abruptly" in said[2]
    assert len(said) == 3


def test_real_processes_compile_and_end() -> None:
    """Started afresh, as CUDA needs it: what a subject is travels to them."""
    said: list[str] = []
    with ahead.Workers(1, CPU, said.append) as workers:
        workers(Toy("one", (1, 2)), (1, 2), H200, 60.0)
    assert [line.partition(" in ")[0] for line in said] == ["one: 6 candidates compiled ahead"]
