"""Refuses configs that a family cannot honour, by the name of the field.

A config field that changes the computation and is silently ignored gives a model that runs and is wrong. So each
family lists the fields it honours, this module lists those that cannot matter for inference, and a test holds both
lists against the config classes of the installed transformers: a new field there fails the test, not a user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engram_runtime.errors import CheckpointError

INERT_FIELDS = frozenset(
    {
        "attention_dropout",  # training only
        "initializer_range",
        "output_router_logits",
        "router_aux_loss_coef",
        "pretraining_tp",  # how a matrix product was split, not what it computes
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",  # the tokenizer's business, see loader.tokenizer
    }
)


@dataclass(frozen=True, slots=True)
class Rule:
    """`accepts` decides about a field's value; `needs` completes the sentence "<field> must be ..."."""

    accepts: Callable[[Any], bool]
    needs: str


def one_of(*values: Any) -> Rule:
    """The field must have one of these values."""
    return Rule(lambda value: value in values, " or ".join(repr(value) for value in values))


_UNSET = Rule(lambda value: not value, "unset")

COMMON_RULES: Mapping[str, Rule] = {
    "quantization_config": Rule(lambda value: value is None, "unset: quantised checkpoints are not supported"),
    "hidden_act": one_of("silu"),
    # Fields that are not part of the supported families but appear in relatives that share their model_type.
    "rope_interleaved": _UNSET,
    "attn_logit_softcapping": _UNSET,
    "final_logit_softcapping": _UNSET,
    "query_pre_attn_scalar": _UNSET,
    "use_qk_norm": _UNSET,
    "qk_layernorm": _UNSET,
    "alibi": _UNSET,
    "clip_qkv": _UNSET,
}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def check_config(config: Any, rules: Mapping[str, Rule]) -> None:
    """Raise CheckpointError naming the first field of a Hugging Face config that cannot be honoured."""
    for name, rule in {**COMMON_RULES, **rules}.items():
        value = getattr(config, name, None)
        if not rule.accepts(value):
            raise CheckpointError(f"config.json: {name} must be {rule.needs}, got {_short(value)}")
    for name in _SIZES:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {name} must be a positive integer, got {_short(value)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise CheckpointError(f"config.json: num_attention_heads {heads} must be a multiple of {kv_heads} kv heads")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise CheckpointError("config.json: sliding_window is in use (layer_types has sliding_attention), unsupported")
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"config.json: rope_parameters.partial_rotary_factor must be 1 here, got {partial}")


def json_values(config: Any, names: frozenset[str]) -> dict[str, Any]:
    """The named fields as JSON values, sorted by name; numbers JSON cannot hold become strings."""
    return {name: _json(getattr(config, name, None)) for name in sorted(names)}


def _json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in sorted(value.items())}
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
