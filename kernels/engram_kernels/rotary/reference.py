"""Reference rotary embedding in Hugging Face's rotate-half convention, whole or partial."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, D] and k [T, K, D] by the angles of `positions` [T] int64; new tensors, same dtypes.

    cos_sin [max_positions, rot] fp32 holds cosines in its first half and sines in its second. Only the first
    rot <= D dimensions of a head are rotated (pairs i and i + rot/2); the rest pass through.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
