"""Qwen2 and Qwen2.5 (dense): q, k and v always have biases, the output projection never."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from engram_runtime.layers.attention import Attention
from engram_runtime.layers.weights import Build
from engram_runtime.models.base import DECODER_FIELDS, CausalLM

WINDOW_FIELDS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
"""Honoured in that a window that is in use is refused; transformers folds them into layer_types."""


class Qwen2(CausalLM):
    honoured: ClassVar[frozenset[str]] = DECODER_FIELDS | WINDOW_FIELDS

    def build_attention(self, config: Any, build: Build, rope: Tensor | None) -> Attention:
        return Attention(build, config.hidden_size, **self.attention_shape(config, rope), qkv_bias=True)
