"""Reference gated norm: the gate is applied before the statistics are taken, per group of channels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """`norm(x * silu(gate)) * weight`: x and gate [T, M], weight [M] -> [T, M] in gate's dtype.

    Each of the `groups` equal parts of M is normalised by itself. x may be fp32 under a bf16 gate: a scan's output
    need not be rounded before it is normalised.
    """
    gated = x.float() * F.silu(gate.float())
    grouped = gated.reshape(*gated.shape[:-1], groups, gated.shape[-1] // groups)
    scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return ((grouped * scale).flatten(-2) * weight.float()).to(gate.dtype)
