"""Every family computes what transformers computes, however the work is cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engram_runtime.loader.model import load_model
from tests.support.steps import Stepper
from tests.support.tiny import FAMILIES, make_tiny

LENGTHS = (150, 37, 1, 64, 90)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}-tied": (family, {"tie_word_embeddings": True}) for family in FAMILIES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24, "num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-default-rope": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2-window-not-in-use": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "granite-groups-and-biases": (
        "granite",
        {"mamba_n_groups": 2, "mamba_proj_bias": True, "attention_bias": True, "mamba_conv_bias": False},
    ),
    "granite-step-limit": ("granite_dense", {"time_step_limit": (0.01, 0.03)}),
    "granite-chunk-7": ("granite_dense", {"mamba_chunk_size": 7}),
    "granite-all-attention": (
        "granite_dense",
        {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
    ),
    "granite-all-mamba": ("granite_dense", {"layer_types": ["mamba"] * 4}),
}


class Case:
    """One variant: its checkpoint, prompts, and the reference's logits for them."""

    def __init__(self, path: Path, family: str, overrides: dict[str, Any]) -> None:
        self.path = make_tiny(family, path, **overrides)
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(3)
        self.prompts = [torch.randint(4, 512, (n,), generator=generator).tolist() for n in LENGTHS]
        with torch.no_grad():
            self.expected = [self.reference(torch.tensor([ids]), use_cache=False).logits[0] for ids in self.prompts]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    cases: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in cases:
            cases[name] = Case(tmp_path_factory.mktemp(name), *VARIANTS[name])
        return cases[name]

    return get


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 everywhere, and the same choice wherever the best two are further apart than 1e-3."""
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-4
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert clear.float().mean() > 0.9
    assert torch.equal(actual.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize("name", VARIANTS)
def test_one_chunk(case_of: Callable[[str], Case], name: str) -> None:
    case = case_of(name)
    stepper = Stepper(load_model(case.path))
    row = stepper.row(case.prompts[0])
    stepper.step([(row, LENGTHS[0])])
    assert_same(stepper.logits(row), case.expected[0])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", VARIANTS)
def test_random_chunks_in_mixed_batches(case_of: Callable[[str], Case], name: str, seed: int) -> None:
    """Sequences start, continue by chunks of 1 to 40 tokens and decode in the same steps, blocks and slots anywhere."""
    case = case_of(name)
    stepper = Stepper(load_model(case.path), seed=seed)
    rows = [stepper.row(prompt) for prompt in case.prompts]
    stepper.run(rows)
    for row, expected in zip(rows, case.expected, strict=True):
        assert_same(stepper.logits(row), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_token_by_token(case_of: Callable[[str], Case], family: str) -> None:
    case = case_of(family)
    stepper = Stepper(load_model(case.path))
    rows = [stepper.row(case.prompts[0]), stepper.row(case.prompts[4])]
    stepper.step([(rows[0], 20), (rows[1], 1)])
    for _ in range(60):
        stepper.step([(row, 1) for row in rows])
    for row, expected in zip(rows, (case.expected[0], case.expected[4]), strict=True):
        assert_same(stepper.logits(row), expected[: row.done])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_errs_no_more_than_the_reference_does(case_of: Callable[[str], Case], family: str) -> None:
    """Against fp32 as the truth: our bf16 error is at most 1.5 times that of transformers in bf16."""
    case = case_of(family)
    stepper = Stepper(load_model(case.path, dtype="bfloat16"))
    rows = [stepper.row(prompt) for prompt in case.prompts]
    stepper.run(rows)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        case.path, attn_implementation="eager", dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        theirs = torch.cat([reference(torch.tensor([ids]), use_cache=False).logits[0].float() for ids in case.prompts])
    truth = torch.cat(case.expected)
    ours = torch.cat([stepper.logits(row) for row in rows])
    error = (ours - truth).norm() / truth.norm()
    assert error <= 1.5 * (theirs - truth).norm() / truth.norm()
    assert error < 0.3


def test_hidden_states_of_other_sequences_do_not_leak(case_of: Callable[[str], Case]) -> None:
    """A sequence gives bit-identical logits alone and beside others when its own cuts are the same."""
    case = case_of("granite")
    alone = Stepper(load_model(case.path))
    row = alone.row(case.prompts[1])
    for count in (20, 17):
        alone.step([(row, count)])
    beside = Stepper(load_model(case.path), seed=9)
    same, other = beside.row(case.prompts[1]), beside.row(case.prompts[0])
    for count in (20, 17):
        beside.step([(same, count), (other, 30)])
    assert float((alone.logits(row) - beside.logits(same)).abs().max()) <= 2e-5
