"""A last layer that computes the last token of each sequence alone gives what all tokens' last layer gives for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engram_runtime.layers import last_tokens
from engram_runtime.loader.model import load_model
from engram_runtime.models.decoder import DecoderLayer
from tests.support.steps import Row, Stepper
from tests.support.tiny import make_tiny

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "llama of one layer": ("llama", {"num_hidden_layers": 1}),
    "granite that ends with attention": ("granite", {"layer_types": ["mamba", "attention"] * 2}),
    "granite that ends with a recurrence": ("granite", {"layer_types": ["attention", "mamba"] * 2}),
}
LENGTHS = (150, 40, 20, 1)


@pytest.fixture(autouse=True)
def _few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_tokens, "OTHERS", 30)


def started(path: Path) -> tuple[Stepper, list[Row]]:
    """Four sequences, of which the first has some tokens already and goes on with one."""
    stepper = Stepper(load_model(path, device="cpu", dtype="float32"))
    generator = torch.Generator().manual_seed(5)
    rows = [stepper.row(torch.randint(0, 100, (length,), generator=generator).tolist()) for length in LENGTHS]
    stepper.step([(rows[0], 99), (rows[1], 17)])
    return stepper, rows


def memory(stepper: Stepper) -> list[Tensor]:
    caches = stepper.caches
    return [*caches.kv, *(state for state in (caches.ssm, caches.conv) if state is not None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_last_tokens_and_memory_are_the_same(family: str, tmp_path: Path) -> None:
    name, overrides = FAMILIES[family]
    path = make_tiny(name, tmp_path, **overrides)
    (whole, all_rows), (pruned, few_rows) = started(path), started(path)
    counts = (1, 20, 13, 1)
    whole.step(list(zip(all_rows, counts, strict=True)))
    ends = pruned.ends(list(zip(few_rows, counts, strict=True)))
    expected = torch.stack([row.hidden[-1][-1] for row in all_rows])
    torch.testing.assert_close(ends, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(memory(pruned), memory(whole), strict=True):
        assert torch.equal(ours, theirs)  # keys, values and states of every token
    whole.step([(all_rows[1], 1), (all_rows[0], 50)])
    pruned.step([(few_rows[1], 1), (few_rows[0], 50)])
    for ours, theirs in zip(few_rows[:2], all_rows[:2], strict=True):
        assert torch.equal(ours.hidden[-1], theirs.hidden[-1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("others", "computed"), [(38, 3), (39, 41)])
def test_the_last_layer_computes_a_row_for_each_sequence(
    family: str, others: int, computed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_tokens, "OTHERS", others)
    name, overrides = FAMILIES[family]
    stepper, rows = started(make_tiny(name, tmp_path, **overrides))
    seen: list[tuple[int, int]] = []

    def note(layer: int) -> Any:
        return lambda module, inputs: seen.append((layer, inputs[0].shape[0]))

    for number, layer in enumerate(stepper.model.layers):
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.feed_forward, nn.Module)
        layer.feed_forward.register_forward_pre_hook(note(number))
    hidden = stepper.ends([(rows[0], 1), (rows[1], 20), (rows[2], 20)])
    *before, last = range(len(stepper.model.layers))
    assert seen == [*((number, 41) for number in before), (last, computed)]
    assert hidden.shape[0] == 3
