"""Reference of the fused step between the QKV projection and attention: the separate ops, one after the other."""

from __future__ import annotations

from torch import Tensor

from engram_kernels.kv_append.reference import kv_append
from engram_kernels.rms_norm.reference import rms_norm
from engram_kernels.rotary.reference import rotary


def rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    kv: Tensor,
    slots: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Norm (if weights [D] are given) and rotate q [T, H, D] and k [T, K, D], append k and v [T, K, D] -> q [T, H, D].

    positions and slots [T] int64; cos_sin [max_positions, rot] fp32 as in `rotary`, or None for a model without
    rotary embedding; kv [2, NB, K, PAGE, D] is written in place. q, k and v may be views of one QKV product.
    """
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    if cos_sin is not None:
        q, k = rotary(q, k, positions, cos_sin)
    kv_append(k, v, kv, slots)
    return q.contiguous()
