"""How a state of fewer than 32 bits is rounded after every token: up or down by chance, so that the mean is exact.

Rounded to nearest, a state that forgets slowly would lose every update smaller than half a unit of its own last place
(bf16: 1/512 of the value), token after token; rounded by chance, such updates arrive as often as their size demands.
The price is noise, the more the longer a head remembers (tests/unit/kernels/test_state_rounding.py lets both drift).

The chance of an element is a hash of the length of its sequence and of its place in the layer's state, and of nothing
else: not of a slot, a place in the batch or a step's number. So whoever computes a token from the same state gets the
same bits, also after a restore, a swap or in other company. Layers share their chances. Here is the definition, which
`kernel.py` repeats; the multipliers are those of lowbias32 (C. Wellons).
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, SECOND = 0x7FEB352D, 0x846CA68B


def check(dtype: torch.dtype) -> None:
    """ValueError for a state that is neither fp32 nor bf16: how others are rounded is not defined."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"ssm_state must be float32 or bfloat16, got {str(dtype).removeprefix('torch.')}")


def stored(state: Tensor, seq_lens: Tensor, dtype: torch.dtype) -> Tensor:
    """state [S, H, P, N] fp32 as it is kept in `dtype` behind the last of seq_lens [S] tokens. fp32 stays as it is.

    bf16: each value becomes one of the two next to it, with chances that keep its mean; NaN and infinities stay.
    ValueError as `check`.
    """
    check(dtype)
    if dtype == torch.float32:
        return state
    bits = state.contiguous().view(torch.int32)
    raised = (bits + chances(seq_lens, state.shape[1:])).bitwise_and_(-65536).view(torch.float32)
    return torch.where(state.isnan(), state, raised).to(dtype)  # a NaN's bits may carry into the sign


def chances(seq_lens: Tensor, shape: torch.Size) -> Tensor:
    """[S, *shape] int32 in [0, 65536): what is added to the lower half of a value's bits before it is cut off."""
    keys = _mixed(seq_lens.to(torch.int32))
    keys = keys ^ _shifted(keys, 16)
    places = torch.arange(shape.numel(), dtype=torch.int32, device=keys.device)
    words = _mixed(keys[:, None] ^ places)
    return _shifted(words, 16).view(-1, *shape)


def _mixed(words: Tensor) -> Tensor:
    """int32 words, which wrap as unsigned ones do."""
    words = words * _signed(FIRST)
    return (words ^ _shifted(words, 15)).mul_(_signed(SECOND))


def _shifted(words: Tensor, count: int) -> Tensor:
    """A logical shift to the right: torch's copies the sign."""
    return (words >> count).bitwise_and_((1 << (32 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
