"""Recurrent-state copies between slots: running states into checkpoint slots and back, in one launch.

A slot holds all layers of a sequence side by side (slot-major), so a copy is one contiguous span for ssm and one for
conv. States are copied as they are, bit by bit. Sources and destinations are disjoint: a checkpoint never overwrites
what the same call reads. Measured on an H200: one slot of Granite-4.0-H-tiny (57 MB) in 34 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Words of a program."""


@triton.jit
def _span(state, a, b, size, part, BLOCK: tl.constexpr):
    """BLOCK words of a slot of `size` words, from slot a to slot b."""
    i = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(state + b * size + i, tl.load(state + a * size + i, mask=i < size), mask=i < size)


@triton.jit
def _copy(ssm, conv, src, dst, ssm_size, conv_size, ssm_parts, BLOCK: tl.constexpr):
    """Program (pair, part): the first `ssm_parts` parts are of ssm, the others of conv."""
    pair = tl.program_id(0)
    part = tl.program_id(1)
    a = tl.load(src + pair).to(tl.int64)
    b = tl.load(dst + pair).to(tl.int64)
    if part < ssm_parts:
        _span(ssm, a, b, ssm_size, part, BLOCK)
    else:
        _span(conv, a, b, conv_size, part - ssm_parts, BLOCK)


def _words(state: Tensor) -> Tensor:
    """[slots, n] of the widest integers that a slot is a whole number of."""
    words = state.view(state.shape[0], -1)
    for wide in (torch.int64, torch.int32, torch.int16):
        if words.shape[1] * words.element_size() % wide.itemsize == 0 and words.data_ptr() % wide.itemsize == 0:
            return words.view(wide)
    return words


def copy_state(ssm: Tensor, conv: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slots src [n] to dst [n] of ssm and conv [slots, layers, ...] in place; no slot is in both src and dst."""
    if not src.numel():
        return
    states = [_words(state) for state in (ssm, conv)]
    sizes = [words.shape[1] for words in states]
    parts = [-(-size // BLOCK) for size in sizes]
    if sum(parts):
        _copy[(src.numel(), sum(parts))](*states, src, dst, *sizes, parts[0], BLOCK, num_warps=8)
