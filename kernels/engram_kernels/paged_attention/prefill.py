"""Causal flash attention over a paged KV cache for prefill chunks: varlen, GQA, any start position, any head size.

The portable kernel (any GPU with Triton, fp32 included); on Hopper `hopper.py` is 20 to 45 % faster for head size 128.
A program takes BM queries of one head. Which sequence and which queries is derived on the GPU from `query_start`, so
the grid depends on the token count only. The KV head is the slowest grid axis: one head's keys stay in the L2.
Sources: FlashAttention-2 (Dao 2023), our prototype. Measured on an H200: 392 TFLOP/s of causal work at 4,096 tokens
with 128 x 64 tiles, 8 warps, 3 stages; starting the next tile's scores before this tile's softmax (AHEAD) costs 15 %.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engram_kernels.varlen import find_block

FAR = tl.constexpr(-1e30)


@triton.jit
def _load(
    plane, page, n0, hi, h, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr
):
    n = n0 + tl.arange(0, BN)
    d = tl.arange(0, DP)
    at = ((page.to(tl.int64) * H + h) * 16 + n % 16)[:, None] * D + d[None, :]
    if MASK or DP != D:
        tile = tl.load(plane + at, mask=(n[:, None] < hi) & (d[None, :] < D), other=0.0)
    else:
        tile = tl.load(plane + at)
    return tile


@triton.jit
def _update(scores, m, den, acc, scale):
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - top[:, None])
    fade = tl.exp2(m - top)
    return top, den * fade + tl.sum(p, 1), acc * fade[:, None], p


@triton.jit(do_not_specialize=["num_blocks", "table_stride", "table_width", "seq0", "num_seqs", "grid_blocks"])
def prefill(
    q, kv, out, query_start, seq_lens, block_tables,
    num_blocks, table_stride, table_width, seq0, num_seqs, grid_blocks, q_stride, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program (g, block, h): BM queries of head h * G + g. AHEAD starts the next scores before the softmax."""
    block = grid_blocks - 1 - tl.program_id(1)  # the longest rows of a sequence first
    h = tl.program_id(2)
    head = h * G + tl.program_id(0)
    s, m0 = find_block(query_start, seq0, num_seqs, block, SP, BM)
    if s < num_seqs:
        q0 = tl.load(query_start + seq0 + s)
        new = tl.load(query_start + seq0 + s + 1) - q0
        length = tl.load(seq_lens + seq0 + s)
        start = length - new + m0  # position of this block's first query
        i = m0 + tl.arange(0, BM)
        d = tl.arange(0, DP)
        row = (q0 + i).to(tl.int64)
        keep = (i < new)[:, None] & (d[None, :] < D)
        qt = tl.load(q + row[:, None] * q_stride + head * D + d[None, :], mask=keep, other=0.0)
        m = tl.full((BM,), FAR, tl.float32)
        den = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, DP), tl.float32)

        v_at = kv + num_blocks.to(tl.int64) * (H * 16 * D)
        pages = block_tables + (seq0 + s).to(tl.int64) * table_stride
        hi = tl.minimum(start + BM, length)
        last = tl.minimum(hi, table_width * 16) - 1
        whole = (start + 1) // BN * BN  # tiles every row sees in full
        n = tl.arange(0, BN)
        page = tl.load(pages + tl.minimum(n, last) // 16)
        if AHEAD:
            scores = tl.zeros((BM, BN), tl.float32)
            if whole > 0:
                scores = tl.dot(qt, _load(kv, page, 0, hi, h, H, D, DP, BN, False).T, input_precision="ieee")
            for n0 in tl.range(0, whole, BN, num_stages=STAGES):
                after = tl.load(pages + tl.minimum(n0 + BN + n, last) // 16)
                # The tile after the last whole one may pass the length: its rows are masked, its scores discarded.
                k = _load(kv, after, n0 + BN, hi, h, H, D, DP, BN, True)
                ahead = tl.dot(qt, k.T, input_precision="ieee")
                m, den, acc, p = _update(scores, m, den, acc, scale)
                v = _load(v_at, page, n0, hi, h, H, D, DP, BN, False)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
                scores = ahead
                page = after
        else:
            for n0 in tl.range(0, whole, BN, num_stages=STAGES):
                after = tl.load(pages + tl.minimum(n0 + BN + n, last) // 16)
                k = _load(kv, page, n0, hi, h, H, D, DP, BN, False)
                scores = tl.dot(qt, k.T, input_precision="ieee")
                m, den, acc, p = _update(scores, m, den, acc, scale)
                v = _load(v_at, page, n0, hi, h, H, D, DP, BN, False)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
                page = after
        position = start + tl.arange(0, BM)
        for n0 in tl.range(whole, hi, BN, num_stages=1):
            page = tl.load(pages + tl.minimum(n0 + n, last) // 16)
            k = _load(kv, page, n0, hi, h, H, D, DP, BN, True)
            scores = tl.dot(qt, k.T, input_precision="ieee")
            scores = tl.where((n0 + n)[None, :] <= position[:, None], scores, FAR)
            m, den, acc, p = _update(scores, m, den, acc, scale)
            v = _load(v_at, page, n0, hi, h, H, D, DP, BN, True)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        tl.store(
            out + row[:, None] * (H * G * D) + head * D + d[None, :],
            (acc / den[:, None]).to(out.dtype.element_ty),
            mask=keep,
        )
