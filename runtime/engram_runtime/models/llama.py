"""Llama 2 and 3, SmolLM2, TinyLlama: the plain decoder; biases only where the config asks for them."""

from __future__ import annotations

from typing import ClassVar

from engram_runtime.models.base import DECODER_FIELDS, CausalLM


class Llama(CausalLM):
    honoured: ClassVar[frozenset[str]] = DECODER_FIELDS | {"attention_bias", "mlp_bias", "head_dim"}
