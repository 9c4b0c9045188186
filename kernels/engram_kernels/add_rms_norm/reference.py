"""Reference of the residual addition and the norm that follows it, one op because kernels fuse them."""

from __future__ import annotations

from torch import Tensor

from engram_kernels.rms_norm.reference import rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """x and residual [T, M], weight [M] -> (norm of the sum [T, M], the sum x * scale + residual [T, M]).

    The sum is rounded to x's dtype before it is normalised, as it would be without fusion.
    """
    total = (x if scale == 1.0 else x * scale) + residual
    return rms_norm(total, weight, eps), total
