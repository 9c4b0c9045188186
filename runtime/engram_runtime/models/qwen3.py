"""Qwen3 (dense): each head of q and k is normalised before the rotation; biases as the config says."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from engram_runtime.layers.attention import Attention
from engram_runtime.layers.weights import Build
from engram_runtime.models.base import DECODER_FIELDS, CausalLM
from engram_runtime.models.qwen2 import WINDOW_FIELDS


class Qwen3(CausalLM):
    honoured: ClassVar[frozenset[str]] = DECODER_FIELDS | WINDOW_FIELDS | {"attention_bias", "head_dim"}

    def build_attention(self, config: Any, build: Build, rope: Tensor | None) -> Attention:
        return Attention(
            build,
            config.hidden_size,
            **self.attention_shape(config, rope),
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps,
        )
