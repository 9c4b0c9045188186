"""Reference of the gated input layer of an MLP: one product, then silu(gate) * up."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from engram_kernels.silu_and_mul.reference import silu_and_mul


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up: x [..., in], weight [2F, in] (gate rows, then up rows), bias [2F] or None -> [..., F]."""
    return silu_and_mul(F.linear(x, weight, bias))
