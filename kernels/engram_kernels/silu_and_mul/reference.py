"""Reference gated activation, computed in fp32 and rounded once."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` where x [..., 2F] is gate then up -> [..., F] in x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)
