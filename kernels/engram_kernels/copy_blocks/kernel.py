"""Block copies inside the caches: both planes of all layers and all pairs in one launch.

A turn begins in the middle of a block that others may share, so a copy stands between a request and its first kernel:
a launch for each of 36 layers took a millisecond of the host's time there.

The reference reads all sources before it writes. Copy-on-write never copies from a block it also writes, and with that
every order is the same; `copy_blocks` checks nothing on the device and documents the condition instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from engram_kernels.gather_kv.kernel import plane_addresses

BLOCK = 2048
"""Words of a program."""


@triton.jit(do_not_specialize=["size"])
def _copy(bases, src, dst, size, BLOCK: tl.constexpr):
    """Program (pair, plane, part): BLOCK words of one block of `size` words."""
    pair = tl.program_id(0)
    base = tl.load(bases + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    base = tl.multiple_of(base, 16)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(src + pair) * size
    b = tl.load(dst + pair) * size
    tl.store(base + b + i, tl.load(base + a + i, mask=i < size), mask=i < size)


def copy_blocks(kv_layers: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy blocks src [n] to dst [n] (int64) of every layer's kv [2, NB, K, PAGE, D] in place; no block is in both."""
    if kv_layers and src.numel():
        copy_blocks_at(plane_addresses(kv_layers), block_words(kv_layers), src, dst)


def block_words(kv_layers: Sequence[Tensor]) -> int:
    """8-byte words of a block of one plane."""
    some = kv_layers[0]
    return some.stride(1) * some.element_size() // 8


def copy_blocks_at(bases: Tensor, words: int, src: Tensor, dst: Tensor) -> None:
    """As `copy_blocks`, over planes whose addresses (`plane_addresses`) and `block_words` the caller has kept."""
    _copy[(src.numel(), bases.numel(), -(-words // BLOCK))](bases, src, dst, words, BLOCK, num_warps=4)
