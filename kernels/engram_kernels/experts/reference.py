"""Reference mixture of experts: one small dense MLP per expert that some token chose, summed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engram_kernels.silu_and_mul.reference import silu_and_mul


def experts(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, ids: Tensor, base: Tensor | None = None) -> Tensor:
    """Weighted sum of the chosen experts' outputs, plus base [T, M] (a shared expert's output) -> [T, M], x's dtype.

    x [T, M]; w_in [E, 2F, M], gate rows then up rows; w_out [E, M, F]; weights [T, k]; ids [T, k] int64, the k
    experts of a token distinct.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        token, choice = torch.where(ids == expert)
        hidden = silu_and_mul(F.linear(x[token], w_in[expert]))
        out = F.linear(hidden, w_out[expert]).float() * weights[token, choice, None].float()
        total.index_add_(0, token, out)
    return total.to(x.dtype) if base is None else total.to(x.dtype) + base
