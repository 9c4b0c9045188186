"""Tiny random checkpoints that look like real ones to every loader.

A plain random initialisation is useless for tests of state: its greedy choice hardly depends on the context, so a
lost cache or a zeroed recurrent state goes unnoticed. The weights here are scaled so that attention is peaked, the
recurrent state remembers hundreds of tokens, and a change of one early token changes the greedy text
(`tests/unit/models/test_tiny.py` checks that for each family).

Everything is drawn from one seeded generator, so two calls with equal arguments write equal weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.tiny_templates import TEMPLATES

FAMILIES = ("llama", "qwen2", "qwen3", "granite", "granite_rope", "granite_dense")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

_PARAGRAPH = """
The memory of a conversation is more than its words. Every turn leaves a trace: the keys and the values that attention
reads again, and the recurrent state that a scan carries from token to token. When the machine stops, the trace is gone
unless somebody wrote it down; then the next question has to pay for the whole history once more. A snapshot keeps it.
Was it cheaper to compute or to copy? Measure, then decide. In 1995 a disk held 850 megabytes; in 2024 a small card
holds 1000000 of them, and 3 of 10 people never notice. Please answer the user briefly. The assistant remembers that
the secret word is "marigold", that the user lives in Zürich, and that the colour of the boat was blue, not green.
def restore(snapshot, position):
    tokens = snapshot.tokens[:position]
    return {"tokens": len(tokens), "state": snapshot.state}
What is the capital of France? Paris is the capital of France. Who wrote the book? I do not know, but I could look it
up: hello world, thank you very much, yes, no, maybe, tomorrow, yesterday, system, user, assistant, tool, function.
"""


def make_tokenizer(*, template: str = "chatml", vocab_size: int = 512) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens with ChatML special tokens and a chat template.

    template: a key of `TEMPLATES`: "chatml", "default_system", "think_strip", "date", "raising" or "tools".
    """
    if template not in TEMPLATES:
        raise ValueError(f"template must be one of {sorted(TEMPLATES)}, got {template!r}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_PARAGRAPH], trainer)
    if backend.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size must be at most {backend.get_vocab_size()}, got {vocab_size}")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def tiny_config(family: str, *, vocab_size: int = 512, **overrides: Any) -> transformers.PreTrainedConfig:
    """The config of one family; `overrides` replace single fields, as in `tie_word_embeddings=True`."""
    base: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    granite: dict[str, Any] = {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "shared_intermediate_size": 64,
    }
    experts: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
    }
    if family == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        return transformers.LlamaConfig(**{**base, "rope_parameters": rope, **overrides})
    if family == "qwen2":
        return transformers.Qwen2Config(**{**base, **overrides})
    if family == "qwen3":
        return transformers.Qwen3Config(**{**base, "head_dim": 32, **overrides})
    if family == "granite":
        return transformers.GraniteMoeHybridConfig(**{**base, **granite, **experts, **overrides})
    if family == "granite_rope":
        rope_type = {"position_embedding_type": "rope"}
        return transformers.GraniteMoeHybridConfig(**{**base, **granite, **experts, **rope_type, **overrides})
    if family == "granite_dense":
        dense = {"num_local_experts": 0, "num_experts_per_tok": 0, "attention_multiplier": 0.25}
        return transformers.GraniteMoeHybridConfig(**{**base, **granite, **dense, **overrides})
    raise ValueError(f"family must be one of {FAMILIES}, got {family!r}")


def make_tiny(
    family: str,
    path: Path | str,
    *,
    seed: int = 0,
    template: str = "chatml",
    vocab_size: int = 512,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int | None = None,
    **overrides: Any,
) -> Path:
    """Write a random Hugging Face checkpoint of `family` with its tokenizer to `path` and return `path`.

    family: one of `FAMILIES`. template: see `make_tokenizer`. dtype: of the stored weights. max_shard_size: as in
    `save_pretrained`, to get several shards and an index. overrides: single config fields.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    model: Any = tiny_model(family, seed=seed, vocab_size=vocab_size, **overrides)
    model.to(dtype)
    model.config.dtype = dtype
    model.generation_config.eos_token_id = [2, 0]
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(directory, **shards)
    make_tokenizer(template=template, vocab_size=vocab_size).save_pretrained(directory)
    return directory


def tiny_model(family: str, *, seed: int = 0, vocab_size: int = 512, **overrides: Any) -> transformers.PreTrainedModel:
    """The `transformers` model itself, fp32 on the CPU, in eval mode."""
    config = tiny_config(family, vocab_size=vocab_size, **overrides)
    auto: Any = transformers.AutoModelForCausalLM
    model: transformers.PreTrainedModel = auto.from_config(config, attn_implementation="eager")
    _fill(model, config, torch.Generator().manual_seed(seed))
    return model.eval()


@torch.no_grad()
def _fill(model: transformers.PreTrainedModel, config: Any, generator: torch.Generator) -> None:
    """Draw every parameter so that activations have unit scale and the output depends on the whole context."""
    residual = getattr(config, "residual_multiplier", 1.0)
    embedding = getattr(config, "embedding_multiplier", 1.0)
    scaling = getattr(config, "logits_scaling", 1.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Scores of q.k with unit-variance entries have standard deviation scale * sqrt(head_dim); aim at 3: peaked, yet
    # not one-hot.
    scale = getattr(config, "attention_multiplier", head_dim**-0.5)
    qk_gain = math.sqrt(3.0 / (scale * math.sqrt(head_dim)))
    tied = config.tie_word_embeddings
    logit_std = 2.0

    def normal(shape: torch.Size, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    for name, parameter in sorted(model.named_parameters()):
        shape = parameter.shape
        leaf = name.split(".")[-2] if name.endswith((".weight", ".bias")) else name.split(".")[-1]
        fan_in = shape[-1]
        if leaf == "embed_tokens":
            value = normal(shape, 0.5 / embedding)
        elif leaf == "lm_head":
            value = normal(shape, logit_std * scaling / math.sqrt(fan_in))
        elif name == "model.norm.weight":
            # A tied head has the embedding's small scale: the final norm makes up for it.
            gain = logit_std * scaling * embedding / 0.5 / math.sqrt(config.hidden_size) if tied else 1.0
            value = (1.0 + normal(shape, 0.1)) * gain
        elif leaf in ("q_norm", "k_norm"):
            value = (1.0 + normal(shape, 0.1)) * qk_gain
        elif leaf in ("q_proj", "k_proj"):
            value = normal(shape, qk_gain / math.sqrt(fan_in) if parameter.dim() == 2 else 0.1)
        elif leaf in ("o_proj", "out_proj", "down_proj", "output_linear") and parameter.dim() >= 2:
            value = normal(shape, 3.0 / residual / math.sqrt(fan_in))
        elif leaf == "in_proj" and parameter.dim() == 2:
            value = normal(shape, 1.0 / math.sqrt(fan_in))
            value[-config.mamba_n_heads :] *= 0.5  # the dt rows: steps vary with the input without drowning the bias
        elif leaf == "dt_bias":
            # As Mamba2 is initialised, with steps between 0.001 and 0.05: states remember hundreds of tokens.
            step = torch.exp(torch.rand(shape, generator=generator) * math.log(50.0) + math.log(0.001))
            value = step + torch.log(-torch.expm1(-step))
        elif leaf == "A_log":
            value = torch.log(1.0 + 3.0 * torch.rand(shape, generator=generator))
        elif leaf == "conv1d" and parameter.dim() == 3:
            value = normal(shape, 1.0 / math.sqrt(fan_in))
        elif leaf == "D" or (parameter.dim() == 1 and name.endswith("norm.weight")):
            value = 1.0 + normal(shape, 0.1)
        elif parameter.dim() == 1:
            value = normal(shape, 0.1)
        else:
            value = normal(shape, 1.4 / math.sqrt(fan_in))
        parameter.copy_(value)
    model.tie_weights()
