"""Reference linear layer: torch's own, which is hard to beat on a CPU."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [..., in], weight [out, in], bias [out] or None, all of one dtype -> [..., out]."""
    return F.linear(x, weight, bias)
