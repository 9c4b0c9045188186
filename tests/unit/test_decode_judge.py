"""The judge of the decode benchmark tells greedy answers of the model from anybody else's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from engram_kernels import Ops
from engram_runtime.layers.weights import Build
from engram_runtime.models.base import CausalLM
from engram_runtime.models.registry import model_class
from tests.bench import bench_decode
from tests.bench.decode_judge import Judge

SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "dense": lambda: transformers.Qwen3Config(
        **SMALL, intermediate_size=48, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SMALL, intermediate_size=16, shared_intermediate_size=32, layer_types=["mamba", "attention"],
        num_local_experts=4, num_experts_per_tok=2, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16,
        mamba_n_groups=1, mamba_expand=2,
    ),
}  # fmt: skip


def _model(config: Any) -> CausalLM:
    build = Build(Ops.bind("cpu", torch.bfloat16), torch.device("cpu"), torch.bfloat16)
    model = model_class(config.model_type)(config, build, max_positions=64)
    chance = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(std=0.05, generator=chance) if parameter.dim() > 1 else parameter.fill_(1.0)
        if parameter.dtype == torch.float32 and parameter.dim() == 1:
            parameter.uniform_(-2.0, -0.5, generator=chance)
    return model


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_the_models_own_choices_are_sound_and_others_are_not(kind: str) -> None:
    config = CONFIGS[kind]()
    judge = Judge(_model(config), config, 64)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 1]]
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(4):
            logprobs = judge._logprobs(judge._exact, torch.tensor([tokens]), len(tokens) - 1, 1)
            tokens.append(int(logprobs[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    verdict = judge.verdict(prompts, answers)
    assert verdict.ours < 1e-5
    assert verdict.is_sound
    answers[1][2] = (answers[1][2] + 1) % 300  # one wrong token, and what follows it
    assert not judge.verdict(prompts, answers).is_sound


def test_a_run_that_only_compiles_asks_for_the_same_sampling() -> None:
    for params in (bench_decode.greedy, lambda tokens: bench_decode.sampled(tokens, 3)):
        assert params(bench_decode.WARM).max_tokens == bench_decode.WARM
        assert params(bench_decode.NEW).temperature == params(bench_decode.WARM).temperature
