"""Fused ops put together from their parts: what a model calls when another backend serves a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engram_kernels.spec import Implementation

if TYPE_CHECKING:
    from torch import Tensor

    from engram_kernels.metadata import StepMetadata


def composed(op: str, bound: Mapping[str, Implementation]) -> Implementation:
    """The fused op `op` from the bound implementations of its parts. Raises ValueError for any other op."""
    if op == "gated_linear":
        linear, silu_and_mul = bound["linear"], bound["silu_and_mul"]

        def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y: Tensor = silu_and_mul(linear(x, weight, bias))
            return y

        return gated_linear
    if op == "rope_attention":
        rope_append, paged_attention = bound["rope_append"], bound["paged_attention"]

        def rope_attention(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cos_sin: Tensor | None,
            kv: Tensor,
            meta: StepMetadata,
            scale: float,
            q_weight: Tensor | None = None,
            k_weight: Tensor | None = None,
            eps: float = 1e-6,
        ) -> Tensor:
            q = rope_append(q, k, v, meta.positions, cos_sin, kv, meta.slots, q_weight, k_weight, eps)
            y: Tensor = paged_attention(q, kv, meta, scale)
            return y

        return rope_attention
    raise ValueError(f"op {op!r} has no parts")
