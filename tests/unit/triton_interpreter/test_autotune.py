"""What `engram autotune` tries of experts and attention is compared with the references: the kernels themselves, tiny.

The interpreter takes a second for some candidates, so most of these take every so many-th of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_kernels.autotune import attention
from engram_kernels.autotune import search as search_module
from engram_kernels.autotune.attention import Chunks, Decodes, Heads, Prefill
from engram_kernels.autotune.driver import H200, Session, Subject, tune
from engram_kernels.autotune.experts import Experts
from engram_kernels.autotune.search import Problem, entry, search
from engram_kernels.autotune.store import known
from engram_kernels.experts.plan import Direct, Grouped, Small
from engram_kernels.paged_attention.kernel import run_split

HALF = torch.float16
CPU = torch.device("cpu")
EXPERTS = Experts(3, 1, 24, 8, 0, HALF, (1, 8))
HEADS = Heads(2, 1, 16, HALF)
TURNED = dataclasses.replace(HEADS, rotated=16, normed=True)
ODD = Heads(3, 1, 24, HALF, rotated=8)
SUBJECTS: dict[str, tuple[Subject, int, int]] = {  # subject, size, every so many-th candidate
    "experts, one token": (dataclasses.replace(EXPERTS, top=2), 1, 5),
    "experts, some tokens": (EXPERTS, 8, 11),
    "experts and a shared one in their launches": (dataclasses.replace(EXPERTS, shared=16), 8, 18),
    "experts and a shared one before": (dataclasses.replace(EXPERTS, shared=12), 5, 18),
    "experts, many tokens each": (EXPERTS, 70, 14),
    "one decode": (Decodes(TURNED, (1,), (20, 150)), 1, 17),
    "decodes": (Decodes(ODD, (3,), (40,)), 3, 13),
    "chunks": (Chunks(ODD, (2,), ((5, 50),)), 2, 6),
    "prefill": (Prefill(HEADS, (70,)), 70, 9),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search poisons its memory itself; one finalist, which repeats its result once."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(search_module, "FINALISTS", 1)
    monkeypatch.setattr(search_module, "REPEATS", 1)


def timer(calls: Sequence[Callable[[], object]]) -> float:
    return float(len(calls))


def asked(name: str) -> Problem[Any]:
    subject, size, every = SUBJECTS[name]
    problem = subject.problem(size, subject.operands(CPU, False), H200)
    return dataclasses.replace(problem, candidates=problem.candidates[::every])


@pytest.mark.parametrize("name", SUBJECTS)
def test_candidates_compute_what_the_reference_does(name: str) -> None:
    problem = asked(name)
    found = search(problem, timer)
    assert found.refused == []
    assert found.tried == len(problem.candidates) >= 3
    assert found.best == problem.candidates[0]  # all take as long here: today's choice stays
    assert set(entry(problem, found)) == {*problem.describe(found.best), "us", "default_us"}


@pytest.mark.parametrize("name", ["experts, some tokens", "one decode", "chunks", "prefill"])
def test_another_result_than_the_reference_is_refused(name: str) -> None:
    problem = asked(name)
    (*others, last) = problem.cases
    wrong = dataclasses.replace(last, expected=lambda: last.expected() * 1.01)
    with pytest.raises(ValueError, match="is right"):
        search(dataclasses.replace(problem, candidates=problem.candidates[:1], cases=[*others, wrong]), timer)


def test_a_key_that_is_not_appended_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search forgets the step's own key before each comparison."""

    def without_slots(choice: Any, q: Any, kv: Any, out: Any, meta: Any, *rest: Any) -> None:
        run_split(choice, q, kv, out, dataclasses.replace(meta, slots=torch.full_like(meta.slots, -1)), *rest)

    monkeypatch.setattr(attention, "run_split", without_slots)
    problem = dataclasses.replace(asked("decodes"), candidates=asked("decodes").candidates[:1])
    with pytest.raises(ValueError, match="wrong by inf"):
        search(problem, timer)


def test_contexts_that_need_too_much_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, lists = Heads(2, 1, 16, HALF), [[(1, length)] * 3 for length in (100, 200, 20)]
    page = 16 * 4 * 16  # bytes of 16 tokens
    monkeypatch.setattr(attention, "CASE_BYTES", 6 * page)
    assert attention.affordable(heads, lists, attention.Operands(CPU, True)) == [lists[0], lists[2]]
    assert attention.affordable(heads, lists, attention.Operands(CPU, False)) == [lists[0]]


@pytest.mark.parametrize("size", [7, 8])
def test_a_long_sequence_among_many_short_ones_is_a_case(size: int) -> None:
    subject = Decodes(HEADS, (size,), (20, 40))
    problem = subject.problem(size, subject.operands(CPU, False), H200)
    assert [case.name for case in problem.cases] == [f"{size}x15", f"{size}x35"] + [f"{size}x240"] * (size >= 8)


def test_all_three_ways_of_the_experts_compete() -> None:
    kinds = {size: {type(choice) for choice in EXPERTS.candidates(size, H200)} for size in (1, 8, 2048)}
    assert kinds == {1: {Direct, Small}, 8: {Direct, Small, Grouped}, 2048: {Grouped}}


@pytest.mark.parametrize("subject", [EXPERTS, Decodes(HEADS, (1, 2), (20,))], ids=["experts", "decodes"])
def test_a_run_over_real_kernels_fills_a_table(subject: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = type(subject).candidates
    monkeypatch.setattr(type(subject), "candidates", lambda self, size, card: every(self, size, card)[::25])
    about = {"gpu": "NVIDIA Imaginary 9", "triton": "3.6.0", "torch": "2.11"}
    said: list[str] = []
    summary = tune([subject], Session(H200, CPU, timer, tmp_path, about, 600.0, said.append))
    assert (summary.found, summary.failed, summary.refused) == (2, 0, 0), said
    assert sorted(known(tmp_path, about)[subject.op]) == sorted(subject.key(size) for size in subject.sizes)
