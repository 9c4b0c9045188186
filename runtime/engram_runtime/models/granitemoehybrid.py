"""Granite 4: Mamba2 and attention layers in one stack, each followed by a shared MLP and (if there are any) experts.

Four multipliers scale embeddings, attention scores, residual contributions and logits. Hybrids have no position
embedding (the recurrence knows the order); the pure-attention sizes rotate.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engram_runtime.errors import CheckpointError
from engram_runtime.layers.attention import Attention
from engram_runtime.layers.mamba2 import Mamba2Mixer, Mamba2Shape
from engram_runtime.layers.mlp import GatedMLP
from engram_runtime.layers.moe import SparseExperts
from engram_runtime.layers.norm import RMSNorm
from engram_runtime.layers.rope import RopeSpec
from engram_runtime.layers.weights import Build, Target, Targets
from engram_runtime.models.base import DECODER_FIELDS, CausalLM
from engram_runtime.models.config_rules import Rule, one_of
from engram_runtime.models.decoder import DecoderLayer
from engram_runtime.models.spec import StateSpec

_KINDS = {"full_attention": "attention", "linear_attention": "mamba"}


class GraniteFeedForward(nn.Module):
    """The shared MLP's output plus the experts' output, when there are experts."""

    def __init__(self, shared: GatedMLP, experts: SparseExperts | None) -> None:
        super().__init__()
        self.shared = shared
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """[T, M] -> [T, M]."""
        if self.experts is None:
            alone: Tensor = self.shared(x)
            return alone
        both: Tensor = self.experts(x, (self.shared.gate_up.weight, self.shared.down.weight))
        return both

    def targets(self, key: str) -> Targets:
        found = self.shared.targets(f"{key}.shared_mlp")
        if self.experts is not None:
            found |= self.experts.router.targets(f"{key}.block_sparse_moe.router.layer")
            found[f"{key}.block_sparse_moe.input_linear.weight"] = Target(self.experts.w_in)
            found[f"{key}.block_sparse_moe.output_linear.weight"] = Target(self.experts.w_out)
        return found


class GraniteMoeHybrid(CausalLM):
    honoured: ClassVar[frozenset[str]] = DECODER_FIELDS | {
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "layer_types",
        "logits_scaling",
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_d_conv",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_expand",
        "mamba_n_groups",
        "mamba_n_heads",
        "mamba_proj_bias",
        "num_experts_per_tok",
        "num_local_experts",
        "position_embedding_type",
        "residual_multiplier",
        "shared_intermediate_size",
        "time_step_limit",
    }
    rules: ClassVar[dict[str, Rule]] = {
        "position_embedding_type": one_of(None, "nope", "rope"),
        "normalization_function": one_of(None, "rmsnorm"),
        "layer_types": Rule(lambda kinds: all(kind in _KINDS for kind in kinds), f"made of {', '.join(_KINDS)}"),
    }

    def build_layer(self, config: Any, build: Build, index: int, rope: Tensor | None) -> DecoderLayer:
        kinds = self.spec.layer_types
        mixer: Attention | Mamba2Mixer
        if kinds[index] == "attention":
            mixer = self.build_attention(config, build, rope)
        else:
            mixer = Mamba2Mixer(
                build,
                config.hidden_size,
                mamba2_shape(config),
                norm_eps=config.rms_norm_eps,
                conv_bias=config.mamba_conv_bias,
                proj_bias=config.mamba_proj_bias,
            )
        return DecoderLayer(
            mixer,
            self._feed_forward(config, build),
            RMSNorm(build, config.hidden_size, config.rms_norm_eps),
            RMSNorm(build, config.hidden_size, config.rms_norm_eps),
            cache_index=kinds[:index].count(kinds[index]),
            residual_scale=config.residual_multiplier,
        )

    def attention_shape(self, config: Any, rope: Tensor | None) -> dict[str, Any]:
        return {**super().attention_shape(config, rope), "scale": config.attention_multiplier}

    def _feed_forward(self, config: Any, build: Build) -> GraniteFeedForward:
        shared = GatedMLP(
            build, config.hidden_size, {"input_linear": 2 * config.shared_intermediate_size}, "output_linear"
        )
        if not config.num_local_experts:
            return GraniteFeedForward(shared, None)
        experts = SparseExperts(
            build,
            config.hidden_size,
            experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            width=config.intermediate_size,
            mode="topk_softmax",
            renormalize=False,
        )
        return GraniteFeedForward(shared, experts)

    def layer_targets(self, layer: nn.Module, key: str) -> Targets:
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.feed_forward, GraniteFeedForward)
        mixer = "self_attn" if isinstance(layer.mixer, Attention) else "mamba"
        return {
            **layer.input_norm.targets(f"{key}.input_layernorm"),
            **layer.post_norm.targets(f"{key}.post_attention_layernorm"),
            **layer.mixer.targets(f"{key}.{mixer}"),
            **layer.feed_forward.targets(key),
        }

    def layer_types(self, config: Any) -> tuple[str, ...]:
        return tuple(_KINDS[kind] for kind in config.layer_types)

    def rope_spec(self, config: Any, head_dim: int) -> RopeSpec | None:
        return super().rope_spec(config, head_dim) if config.position_embedding_type == "rope" else None

    def state_spec(self, config: Any, dtype: torch.dtype) -> StateSpec | None:
        layers = self.layer_types(config).count("mamba")
        if not layers:
            return None
        shape = mamba2_shape(config)
        return StateSpec(
            num_layers=layers,
            ssm_shape=(shape.heads, shape.head_dim, shape.state_size),
            conv_shape=(shape.channels, shape.conv_width - 1),
            chunk_size=shape.chunk_size,
            conv_dtype=str(dtype).removeprefix("torch."),
        )


def mamba2_shape(config: Any) -> Mamba2Shape:
    """The mixer's dimensions. Raises CheckpointError when heads do not divide into groups."""
    if config.mamba_n_heads % config.mamba_n_groups:
        raise CheckpointError(
            f"config.json: mamba_n_heads {config.mamba_n_heads} must be a multiple of "
            f"mamba_n_groups {config.mamba_n_groups}"
        )
    low, high = config.time_step_limit or (0.0, float("inf"))
    return Mamba2Shape(
        heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        state_size=config.mamba_d_state,
        groups=config.mamba_n_groups,
        conv_width=config.mamba_d_conv,
        chunk_size=config.mamba_chunk_size,
        dt_limit=(float(low), float(high)),
    )
