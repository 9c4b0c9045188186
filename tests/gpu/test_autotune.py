"""`engram autotune` on the card: real times, refusals that leave the card usable, and what the shipped table lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_kernels.autotune.ahead import Workers
from engram_kernels.autotune.attention import Chunks, Decodes, Heads, Prefill
from engram_kernels.autotune.driver import Card, Session, tune
from engram_kernels.autotune.experts import Experts
from engram_kernels.autotune.linear import Layer
from engram_kernels.autotune.search import Problem, graph_timer, search
from engram_kernels.autotune.store import known
from engram_kernels.experts.plan import Direct, Small, parse
from engram_kernels.paged_attention import plan
from engram_kernels.paged_attention.plan import Split, Tile
from engram_kernels.tuning import load_table, parameters

BF16 = torch.bfloat16
HEADS = Heads(32, 8, 128, BF16, rotated=128, normed=True)
SMALL_HEADS = Heads(9, 3, 64, BF16, rotated=64)
EXPERTS = Experts(64, 6, 1536, 512, 1024, BF16, (8, 64))
SUBJECTS: dict[str, tuple[Any, int]] = {
    "experts, 1 token": (EXPERTS, 1),
    "experts, 8 tokens": (EXPERTS, 8),
    "experts, 64 tokens": (EXPERTS, 64),
    "experts, 1024 tokens": (EXPERTS, 1024),
    "1 decode": (Decodes(HEADS, (1,)), 1),
    "64 decodes": (Decodes(HEADS, (64,), (500,)), 64),
    "chunks": (Chunks(HEADS, (2,)), 2),
    "prefill": (Prefill(SMALL_HEADS, (512,)), 512),
    "linear": (Layer(1024, 2048), 8),
    "gated": (Layer(1024, 1536, gated=True), 8),
    "vocabulary": (Layer(20000, 1024, wide=True), 4),
}


@pytest.fixture(autouse=True)
def _as_served() -> None:
    torch.use_deterministic_algorithms(False)  # the search poisons its memory itself


def few(problem: Problem[Any], every: int = 8) -> Problem[Any]:
    return dataclasses.replace(problem, candidates=problem.candidates[::every])


def on_this_card() -> tuple[torch.device, Card]:
    device = torch.device("cuda", torch.cuda.current_device())
    return device, Card.of(device)


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_so_many_th_candidate_is_right_and_timed(name: str) -> None:
    subject, size = SUBJECTS[name]
    device, card = on_this_card()
    with torch.inference_mode():
        problem = few(subject.problem(size, subject.operands(device, True), card))
        found = search(problem, graph_timer(budget_ms=0.5, rounds=1))
    assert found.wrong == 0, found.refused
    assert found.tried >= len(problem.candidates) // 2, found.refused
    assert all(0.5 < taken < 1e5 for taken in found.microseconds)


def test_a_candidate_that_does_not_fit_is_refused_and_the_card_goes_on() -> None:
    device, card = on_this_card()
    with torch.inference_mode():
        problem = EXPERTS.problem(8, EXPERTS.operands(device, False), card)
        candidates = [problem.candidates[0], Small(16, 128, 128, 256, 8, 4), Direct(2, 4, 4)]
        found = search(dataclasses.replace(problem, candidates=candidates), graph_timer(0.5, 1))
    assert (found.tried, len(found.refused), found.wrong) == (2, 1, 0), found.refused


def test_the_timer_counts_every_call() -> None:
    source, target = (torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    timer = graph_timer()
    once = timer([lambda: target.copy_(source)] * 4)
    twice = timer([lambda: (target.copy_(source), target.copy_(source))] * 4)
    assert 1.7 < twice / once < 2.3


def test_a_run_with_processes_that_compile_ahead_fills_a_table(tmp_path: Path) -> None:
    device, card = on_this_card()
    said: list[str] = []
    about = {"gpu": torch.cuda.get_device_name(), "triton": "any", "torch": torch.__version__}
    layer = Layer(512, 512, sizes=(1, 2))
    with torch.inference_mode(), Workers(2, device, said.append) as ahead:
        session = Session(card, device, graph_timer(0.5, 1), tmp_path, about, 300.0, said.append, ahead=ahead)
        summary = tune([layer], session)
    assert (summary.found, summary.failed, summary.wrong) == (2, 0, 0), said
    assert said[0].startswith("linear: ")
    assert not said[0].startswith("linear: 0 ")
    assert sorted(known(tmp_path, about)["linear"]) == [layer.key(1), layer.key(2)]


def named(key: str) -> dict[str, Any]:
    return dict(part.split("=") for part in key.split(","))


def listed(op: str) -> Sequence[str]:
    """Keys of whole shapes; those of the rules name a size or a dtype only."""
    return sorted(key for key in load_table("nvidia_h200").get(op, {}) if "dtype=" in key and key.count(",") > 2)


def checked(subject: Any, size: int, choice: Any) -> None:
    device, card = on_this_card()
    operands = subject.operands(device, False)
    with torch.inference_mode():
        problem = subject.problem(size, operands, card)
        found = search(dataclasses.replace(problem, candidates=[choice]), lambda calls: 1.0)
    assert found.refused == []


def heads_of(words: dict[str, Any]) -> Heads:
    return Heads(
        int(words["heads"]), int(words["kv_heads"]), int(words["dim"]), getattr(torch, words["dtype"]), normed=True
    )


@pytest.mark.parametrize("key", listed("experts"))
def test_every_shipped_entry_of_experts(key: str) -> None:
    words = named(key)
    shape = (int(words[name]) for name in ("experts", "top", "width", "inner", "shared"))
    subject = Experts(*shape, getattr(torch, words["dtype"]), ())  # type: ignore[misc,arg-type]
    checked(subject, int(words["tokens"]), parse(load_table("nvidia_h200")["experts"][key]))


@pytest.mark.parametrize("key", listed(plan.SPLIT))
def test_every_shipped_entry_of_split_attention(key: str) -> None:
    words = named(key)
    form = Decodes if words["block"] == "1" else Chunks
    choice = parameters(Split, load_table("nvidia_h200")[plan.SPLIT][key], key)
    checked(form(heads_of(words), ()), int(words["sequences"]), choice)


@pytest.mark.parametrize("key", listed(plan.PREFILL))
def test_every_shipped_entry_of_prefill(key: str) -> None:
    words = named(key)
    choice = parameters(Tile, load_table("nvidia_h200")[plan.PREFILL][key], key)
    checked(Prefill(heads_of(words), ()), int(words["tokens"]), choice)
