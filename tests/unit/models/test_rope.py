"""Rotary tables equal transformers' bit for bit: at position 100,000 one unit in the last place is already visible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engram_runtime.layers.rope import canonical_rope, inverse_frequencies, rotary_table

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 0.9, "beta_fast": 16, "beta_slow": 2},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn-no-truncate": {**YARN, "truncate": False},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PARAMETERS)
def test_table_equals_transformers(name: str, head_dim: int) -> None:
    parameters = PARAMETERS[name]
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        rope_parameters=dict(parameters),
        max_position_embeddings=131072,
    )
    reference = LlamaRotaryEmbedding(config)
    spec = canonical_rope(parameters, head_dim)
    torch.testing.assert_close(inverse_frequencies(spec), reference.inv_freq, rtol=0, atol=0)
    positions = torch.tensor([[0, 1, 17, 4095, 40000, 131071]])
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), positions)
    table = rotary_table(spec, 131072, torch.device("cpu"))[positions[0]]
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=0)


def test_the_canonical_description_holds_what_the_table_depends_on() -> None:
    assert canonical_rope({"rope_theta": 10000.0}, 64) == {"type": "default", "theta": 10000.0, "rotary_dim": 64}
    assert canonical_rope({**PARAMETERS["default"], "factor": 9.0}, 64) == canonical_rope(PARAMETERS["default"], 64)
    assert canonical_rope(LLAMA3, 64) != canonical_rope({**LLAMA3, "factor": 8.0}, 64)
    assert canonical_rope({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, 64)["rotary_dim"] == 16


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4}, "rope_type 'longrope' is not supported"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "rope_type 'dynamic' is not supported"),
        ({"rope_type": "default"}, "rope_theta is missing"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor is missing"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": -1.0}, "factor must be a positive number"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}, "factor must be a positive number"),
        ({"rope_type": "default", "rope_theta": float("inf")}, "rope_theta must be a positive number"),
        ({"rope_type": "default", "rope_theta": True}, "rope_theta must be a positive number"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"rope_parameters.{field}"):
        canonical_rope(parameters, 64)
