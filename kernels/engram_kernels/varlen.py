"""Which sequence a program works on, derived on the GPU from the prefix sums of a step's new tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_block(query_start, seq0, num_seqs, block, SP: tl.constexpr, BM: tl.constexpr):
    """Sequence and first query of the block-th block of BM queries; sequence >= num_seqs when there is none."""
    s = tl.arange(0, SP)
    live = s < num_seqs
    first = tl.load(query_start + seq0 + s, mask=live, other=0)
    blocks = (tl.load(query_start + seq0 + s + 1, mask=live, other=0) - first + BM - 1) // BM
    end = tl.cumsum(blocks, 0)
    seq = tl.sum((end <= block).to(tl.int32))
    before = tl.sum(tl.where(s == seq, end - blocks, 0))
    return seq, (block - before) * BM
