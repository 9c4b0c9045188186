"""The search itself: run, compare, time, keep the fastest of those that are right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

C = TypeVar("C")

Timer = Callable[[Sequence[Callable[[], object]]], float]
"""Microseconds of one call; the calls do the same to rotated operands, so that no cache holds them."""


@dataclass(frozen=True, slots=True)
class Problem(Generic[C]):
    """One op at one shape. `run(candidate, i)` writes `output` from operand set i of `rotations`; `baseline(i)` does
    it as it is done where no candidate wins."""

    op: str
    key: str
    candidates: Sequence[C]
    run: Callable[[C, int], None]
    baseline: Callable[[int], object]
    output: Tensor
    expected: Tensor
    """For operand set 0, in a higher precision."""
    tolerance: float
    """Largest relative error ||output - expected|| / ||expected||."""
    rotations: int
    describe: Callable[[C], dict[str, Any]]


@dataclass(slots=True)
class Found(Generic[C]):
    """`best` is None where the baseline stays; `refused` says why candidates were not timed."""

    best: C | None
    microseconds: float
    baseline_microseconds: float
    tried: int = 0
    refused: list[str] = field(default_factory=list)


def search(problem: Problem[C], timer: Timer) -> Found[C]:
    """Try every candidate; one that fails or computes something else is refused, never timed."""

    def calls(one: Callable[[int], object]) -> list[Callable[[], object]]:
        return [lambda i=i: one(i) for i in range(problem.rotations)]  # type: ignore[misc]

    baseline = timer(calls(problem.baseline))
    found: Found[C] = Found(None, baseline, baseline)
    for candidate in problem.candidates:
        try:
            problem.output.fill_(float("nan"))  # what is not written cannot look right
            problem.run(candidate, 0)
            error = relative_error(problem.output, problem.expected)
            if not error <= problem.tolerance:
                found.refused.append(f"{candidate}: wrong by {error:.1e}")
                continue
            taken = timer(calls(lambda i, c=candidate: problem.run(c, i)))  # type: ignore[misc]
        except Exception as failure:  # compilers and drivers raise what they like
            found.refused.append(f"{candidate}: {type(failure).__name__}: {str(failure)[:120]}")
            continue
        found.tried += 1
        if taken < found.microseconds:
            found.best, found.microseconds = candidate, taken
    return found


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
            calls[0]()
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
