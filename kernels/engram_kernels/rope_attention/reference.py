"""Reference: per-head norms, rotation and append, then attention over the cache."""

from __future__ import annotations

from torch import Tensor

from engram_kernels.metadata import StepMetadata
from engram_kernels.paged_attention.reference import paged_attention
from engram_kernels.rope_append.reference import rope_append


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
    """q [T, H, D], k and v [T, K, D] as projected -> attended [T, H, D]; the step's keys and values are appended to
    kv [2, NB, K, 16, D]. cos_sin, q_weight, k_weight, eps as in `rope_append`."""
    q = rope_append(q, k, v, meta.positions, cos_sin, kv, meta.slots, q_weight, k_weight, eps)
    return paged_attention(q, kv, meta, scale)
