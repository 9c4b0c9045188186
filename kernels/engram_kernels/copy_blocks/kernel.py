"""Block copies inside a layer's cache: both planes and all pairs in one launch.

The reference reads all sources before it writes. Copy-on-write never copies from a block it also writes, and with that
every order is the same; `copy_blocks` checks nothing on the device and documents the condition instead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engram_kernels.launch import next_power_of_2


@triton.jit(do_not_specialize=["num_blocks"])
def _copy(kv, src, dst, num_blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (pair, plane, part): BLOCK elements of one block of SIZE."""
    pair = tl.program_id(0)
    plane = kv + tl.program_id(1).to(tl.int64) * num_blocks * SIZE
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(src + pair).to(tl.int64) * SIZE
    b = tl.load(dst + pair).to(tl.int64) * SIZE
    tl.store(plane + b + i, tl.load(plane + a + i, mask=i < SIZE), mask=i < SIZE)


def copy_blocks(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy blocks src [n] to dst [n] of kv [2, NB, K, PAGE, D] in place; no block is in both src and dst."""
    if not src.numel():
        return
    size = kv[0, 0].numel()
    block = min(4096, next_power_of_2(size))
    _copy[(src.numel(), 2, -(-size // block))](kv, src, dst, kv.shape[1], size, block, num_warps=4)
