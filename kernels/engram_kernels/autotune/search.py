"""The search itself: run, compare, time, keep the fastest of those that are right.

What a candidate leaves unwritten must not look right because the one before it wrote there, so for the comparison all
memory that is asked for comes filled with NaN, scratch of several launches included. The times of a search lie seconds
apart, with compilers at work in between; so the few fastest are timed again, one right after the other, and the winner
has to repeat its result bit by bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

C = TypeVar("C")

Timer = Callable[[Sequence[Callable[[], object]]], float]
"""Microseconds of one call; the calls do the same to rotated operands, so that no cache holds them."""

FINALISTS = 4
REPEATS = 3


class OutOfTime(Exception):
    """A search was not brought to its end."""


class DeviceLost(Exception):
    """A candidate left the device in a state in which nothing runs any more."""


@dataclass(frozen=True, slots=True)
class Case(Generic[C]):
    """One of the sizes that a key serves. `run(candidate, i)` computes operand set i of `rotations`."""

    name: str
    run: Callable[[C, int], Tensor]
    expected: Callable[[], Tensor]
    """The result for operand set 0, in a higher precision."""
    rotations: int
    baseline: Callable[[int], object] | None = None
    """As it is done where no candidate wins. None: by the first candidate."""
    rows: Tensor | None = None
    """Rows of the result that `expected` has; None: all."""
    prepare: Callable[[], object] | None = None
    """Called before each comparison, for what the op writes besides its result."""


@dataclass(frozen=True, slots=True)
class Problem(Generic[C]):
    """One op and the key of its table. Without a baseline the first candidate is the choice without a table, and the
    fastest of those that are right wins; with one (in all cases, then) it has to be faster."""

    op: str
    key: str
    candidates: Sequence[C]
    cases: Sequence[Case[C]]
    tolerance: float
    """Largest relative error ||result - expected|| / ||expected||."""
    describe: Callable[[C | None], dict[str, Any]]
    """A candidate, or the baseline, as a table entry."""
    before: str = "default_us"
    """Name, in the entry, of the time without a table."""


@dataclass(slots=True)
class Found(Generic[C]):
    """`best` is None where the baseline stays. Microseconds of each case; `before`: of the choice without a table, None
    where that one is not right. `refused` says why candidates were not timed, `wrong` of them computed something else.
    """

    best: C | None
    microseconds: list[float]
    before: list[float] | None
    tried: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: int = 0


def search(problem: Problem[C], timer: Timer, expired: Callable[[], bool] = lambda: False) -> Found[C]:
    """Try every candidate; one that fails or computes something else is refused, never timed.

    Raises OutOfTime as soon as `expired` says so, DeviceLost, ValueError when no candidate is right and there is no
    baseline, and what the baseline raises.
    """
    found: Found[C] = Found(None, [], None)
    expected = [case.expected() for case in problem.cases]
    reference = _times(problem, None, timer) if problem.cases[0].baseline is not None else None
    times: dict[C, list[float]] = {}
    for candidate in problem.candidates:
        if expired():
            raise OutOfTime
        try:
            error = max(map(_error, problem.cases, expected, [candidate] * len(expected)))
            if not error <= problem.tolerance:
                found.refused.append(f"{candidate}: wrong by {error:.1e}")
                found.wrong += 1
                continue
            times[candidate] = _times(problem, candidate, timer)
        except Exception as failure:  # compilers and drivers raise what they like
            found.refused.append(f"{candidate}: {type(failure).__name__}: {str(failure)[:120]}")
            check_device(found.refused[-1])
            continue
        found.tried += 1
    if reference is None and not times:
        raise ValueError(f"no candidate of {problem.op} {problem.key} is right: {'; '.join(found.refused[:3])}")
    scale = reference or next(iter(times.values()))
    final = {one: _times(problem, one, timer) for one in _ranked(times, scale)[:FINALISTS]}
    if reference is not None:
        reference = _times(problem, None, timer)
        final = {one: taken for one, taken in final.items() if _score(taken, reference) < 1.0}
    for candidate in _ranked(final, scale):
        if not _repeats(problem, candidate):
            found.refused.append(f"{candidate}: another result each time")
            found.wrong += 1
            continue
        found.best = candidate
        break
    if found.best is None and reference is None:
        raise ValueError(f"no candidate of {problem.op} {problem.key} repeats its result")
    found.before = reference or final.get(problem.candidates[0]) or times.get(problem.candidates[0])
    found.microseconds = final[found.best] if found.best is not None else found.before or []
    return found


def entry(problem: Problem[C], found: Found[C]) -> dict[str, Any]:
    """What the table keeps: parameters, and the times for whoever reads it."""

    def shown(times: list[float]) -> Any:
        if len(times) == 1:
            return round(times[0], 2)
        return {case.name: round(taken, 2) for case, taken in zip(problem.cases, times, strict=True)}

    kept = {**problem.describe(found.best), "us": shown(found.microseconds)}
    return kept if found.before is None else {**kept, problem.before: shown(found.before)}


def _score(times: Sequence[float], reference: Sequence[float]) -> float:
    """Mean over the cases of the time relative to the reference: a short case counts as much as a long one."""
    return sum(taken / base for taken, base in zip(times, reference, strict=True)) / len(reference)


def _ranked(times: dict[C, list[float]], reference: Sequence[float]) -> list[C]:
    return sorted(times, key=lambda one: _score(times[one], reference))


def _times(problem: Problem[C], candidate: C | None, timer: Timer) -> list[float]:
    """Microseconds of each case with a candidate, or (None) of the baseline."""

    def calls(case: Case[C]) -> list[Callable[[], object]]:
        def call(i: int) -> object:
            if candidate is not None:
                return case.run(candidate, i)
            assert case.baseline is not None
            return case.baseline(i)

        return [lambda i=i: call(i) for i in range(case.rotations)]  # type: ignore[misc]

    return [timer(calls(case)) for case in problem.cases]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, `torch.empty` comes filled with NaN, integers with their maximum."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _checked(case: Case[C], candidate: C) -> Tensor:
    """The result for operand set 0, computed into poisoned memory."""
    if case.prepare is not None:
        case.prepare()
    with poisoned():
        return case.run(candidate, 0)


def _error(case: Case[C], expected: Tensor, candidate: C) -> float:
    result = _checked(case, candidate)
    if not bool(torch.isfinite(result).all()):
        return math.inf
    return relative_error(result if case.rows is None else result[case.rows], expected)


def _repeats(problem: Problem[C], candidate: C) -> bool:
    for case in problem.cases:
        first = _checked(case, candidate).clone()
        if not all(torch.equal(_checked(case, candidate), first) for _ in range(REPEATS)):
            return False
    return True


def check_device(refusal: str) -> None:
    """Raises DeviceLost: a fault of one kernel that the driver does not forgive makes every later call fail."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except Exception as failure:
        raise DeviceLost(f"nothing runs on the device any more after {refusal}") from failure


def relative_error(output: Tensor, expected: Tensor) -> float:
    """||output - expected|| / ||expected|| in fp32; infinite when anything was not written or is not a number."""
    error = float((output.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


def graph_timer(budget_ms: float = 2.0, rounds: int = 3) -> Timer:
    """Times by replays of a CUDA graph, median of some rounds: no launch gaps of the host in it."""

    def timer(calls: Sequence[Callable[[], object]]) -> float:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in (calls[0], calls[-1]):  # nothing may be compiled, or scratch made for good, in the graph
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def measure(replays: int) -> float:
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) / replays

        measure(1)
        replays = max(1, int(budget_ms / max(measure(1), 1e-3)))
        measure(replays)  # discarded: short windows read slower on large reads
        return sorted(measure(replays) for _ in range(rounds))[rounds // 2] / len(calls) * 1e3

    return timer
