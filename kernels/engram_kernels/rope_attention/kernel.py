"""Rotation, append and attention of a step: one launch less a layer where the step is decodes only.

A decode's query and its one new key are small enough that every program of the attention kernel can norm and rotate
them itself (see `split_kv.attend`). A step with chunks takes `rope_append`, then the attention kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram_kernels.metadata import StepMetadata
from engram_kernels.paged_attention.kernel import Fresh, paged_attention, split
from engram_kernels.rope_append.kernel import rope_append


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
    """As the reference; q, k, v may have any token stride with contiguous heads."""
    dim = q.shape[2]
    packed = all(t.stride(2) == 1 and t.stride(1) == dim for t in (q, k, v)) and k.stride(0) == v.stride(0)
    if meta.num_decodes != meta.num_sequences or not packed:
        q = rope_append(q, k, v, meta.positions, cos_sin, kv, meta.slots, q_weight, k_weight, eps)
        return paged_attention(q, kv, meta, scale)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight must be given together")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if meta.num_decodes:
        fresh = Fresh(k, v, cos_sin, q_weight, k_weight, eps)
        split(q, kv, out, meta, 0, meta.num_decodes, meta.num_decodes, 1, scale, fresh)
    return out
