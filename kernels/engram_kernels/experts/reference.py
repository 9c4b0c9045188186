"""Reference mixture of experts: one small dense MLP per expert that some token chose, summed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engram_kernels.silu_and_mul.reference import silu_and_mul


def experts(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    ids: Tensor,
    base: Tensor | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs, plus base [T, M], plus a shared expert's -> [T, M], x's dtype.

    x [T, M]; w_in [E, 2F, M], gate rows then up rows; w_out [E, M, F]; weights [T, k]; ids [T, k] int64, the k
    experts of a token distinct; shared ([2S, M], [M, S]): weights of an expert that every token takes with weight 1.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        token, choice = torch.where(ids == expert)
        hidden = silu_and_mul(F.linear(x[token], w_in[expert]))
        out = F.linear(hidden, w_out[expert]).float() * weights[token, choice, None].float()
        total.index_add_(0, token, out)
    result = total.to(x.dtype)
    if base is not None:
        result = result + base
    if shared is not None:
        result = result + F.linear(silu_and_mul(F.linear(x, shared[0])), shared[1])
    return result
