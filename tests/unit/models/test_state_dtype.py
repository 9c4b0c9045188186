"""A tiny hybrid with its recurrent states in bf16 beside the same one in fp32: in chunks, in company, and over a long
reply."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engram_runtime.loader.model import load_model
from tests.support.steps import Stepper
from tests.support.tiny import make_tiny

BF16 = "bfloat16"
LIMIT = 0.01
"""Relative distance of logits; keeping the whole model in bf16 costs this one 0.028."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without experts: a choice of another one would hide how far states are apart."""
    return make_tiny("granite_dense", tmp_path_factory.mktemp("granite"))


def tokens(length: int, seed: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(4, 512) for _ in range(length)]


def distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


def test_chunks_and_decodes_in_mixed_batches_are_close_to_fp32(hybrid: Path) -> None:
    logits = {}
    for dtype in ("float32", BF16):
        stepper = Stepper(load_model(hybrid, state_dtype=dtype), seed=2)
        assert stepper.caches.ssm is not None
        assert stepper.caches.ssm.dtype == getattr(torch, dtype)
        rows = [stepper.row(tokens(length, length)) for length in (150, 37, 1, 64, 90)]
        stepper.run(rows)
        logits[dtype] = torch.cat([stepper.logits(row) for row in rows])
    assert 0 < distance(logits[BF16], logits["float32"]) < LIMIT
    agree = (logits[BF16].argmax(-1) == logits["float32"].argmax(-1)).float().mean()
    assert float(agree) > 0.95


def test_a_reply_of_600_tokens_does_not_drift(hybrid: Path) -> None:
    """The same tokens, decoded one by one: the logits are no further from fp32's at the end than at the beginning."""
    said = tokens(640, 5)
    logits = []
    for dtype in ("float32", BF16):
        stepper = Stepper(load_model(hybrid, state_dtype=dtype))
        row = stepper.row(said)
        stepper.step([(row, 40)])
        for _ in range(600):
            stepper.step([(row, 1)])
        logits.append(stepper.logits(row))
    exact, ours = logits
    early, late = (distance(ours[part], exact[part]) for part in (slice(40, 240), slice(440, 640)))
    assert late < 1.3 * early < LIMIT


def test_a_sequence_gets_the_same_bits_in_any_slot_and_blocks(hybrid: Path) -> None:
    """Its chunks begin and end where they did; then its states after the last token are equal bit by bit. (In company
    the products of a CPU differ in their last digits, whatever states are kept in.)"""

    def states(seed: int) -> tuple[int, torch.Tensor]:
        stepper = Stepper(load_model(hybrid, state_dtype=BF16), seed=seed)
        row = stepper.row(tokens(60, 1))
        for count in (20, 7, *[1] * 33):
            stepper.step([(row, count)])
        assert stepper.caches.ssm is not None
        return row.slot, stepper.caches.ssm[row.slot].clone()

    found = [states(seed) for seed in range(4)]
    assert len({slot for slot, _ in found}) > 1
    for _, state in found[1:]:
        assert torch.equal(state, found[0][1])
