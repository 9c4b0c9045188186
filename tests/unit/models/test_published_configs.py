"""Configs as published build models of exactly the size that transformers builds; nothing is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engram_kernels import Ops
from engram_runtime.executor.device.mixed import worth_recording
from engram_runtime.layers.weights import Build
from engram_runtime.loader.config import load_config
from engram_runtime.models.base import CausalLM
from engram_runtime.models.registry import model_class

GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "init_method": "mup",
    "logits_scaling": 6,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "position_embedding_type": "nope",
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
EVERY_TENTH = ["attention" if index % 10 == 5 else "mamba" for index in range(40)]

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "vocab_size": 49152,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "granite-h-tiny": {
        **GRANITE,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "layer_types": EVERY_TENTH,
        "num_experts_per_tok": 6,
        "num_local_experts": 64,
        "shared_intermediate_size": 1024,
    },
    "granite-micro": {
        **GRANITE,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "layer_types": ["attention"] * 40,
        "mamba_n_heads": 80,
        "num_attention_heads": 40,
        "num_experts_per_tok": 0,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "rope_theta": 10000000,
        "shared_intermediate_size": 8192,
    },
}

KNOWN_PARAMETERS = {"llama-3.2-1b": 1_235_814_400, "smollm2-135m": 134_515_008, "qwen2.5-0.5b": 494_032_768}


def on_meta(name: str, folder: Path) -> tuple[CausalLM, Any]:
    """The model without memory for its weights, and its config."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = load_config(folder)
    build = Build(Ops.bind("cpu", torch.bfloat16), torch.device("meta"), torch.bfloat16)
    return model_class(config.model_type)(config, build, max_positions=16), config


def test_how_far_launching_takes_longer_than_computing(tmp_path: Path) -> None:
    """Small models in thousands of tokens, of experts only those that a token meets."""
    dense, _ = on_meta("llama-3.2-1b", tmp_path)
    assert dense.weights_per_token() == 1_235_814_400 - 128_256 * 2048 - 2048  # all but the embedding and the last norm
    assert worth_recording(dense) == 2944
    sparse, config = on_meta("granite-h-tiny", tmp_path)
    experts = sum(weight.numel() for weight in sparse.parameters() if weight.dim() == 3)
    others = sum(weight.numel() for weight in sparse.layers.parameters()) - experts
    met = experts * config.num_experts_per_tok // config.num_local_experts
    assert sparse.weights_per_token() == others + met
    launching = 40 * 0.6e-3 + (36 + 40) * 0.3e-3  # every layer; those with states, and those with experts
    assert worth_recording(sparse) == int(launching * 600e12 / (2 * (others + met))) // 64 * 64 == 10_688


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_transformers(name: str, tmp_path: Path) -> None:
    model, config = on_meta(name, tmp_path)
    with torch.device("meta"):
        auto: Any = transformers.AutoModelForCausalLM
        reference = auto.from_config(config)
    ours = sum(parameter.numel() for parameter in model.parameters())
    assert ours == sum(parameter.numel() for parameter in reference.parameters())
    assert ours == KNOWN_PARAMETERS.get(name, ours)
    assert sum(target.tensor.numel() for target in model.targets().values()) == ours
