"""Reference RMS norm: statistics and scaling in fp32 whatever the model's dtype, rounded once at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension: x [..., M], weight [M] -> [..., M] in x's dtype."""
    x_fp32 = x.float()
    scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return (x_fp32 * scale * weight.float()).to(x.dtype)
