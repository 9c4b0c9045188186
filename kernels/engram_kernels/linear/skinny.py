"""Linear layers of a few rows on tensor cores, split along K so that small layers fill the card.

The reads of the weights decide, so a program streams a tall weight tile through a deep pipeline. SWAP puts the
weights on the M side of the matrix instruction (wgmma needs 64 rows there, and there are fewer tokens). Partial sums of
a split go to fp32 scratch; the last program of a tile to finish adds them in a fixed order, so results do not depend on
timing. Sources: split-K of gemlite, vLLM's swap-AB; our prototype: level with cuBLAS or ahead up to 64 rows, behind
from 128. Measured on an H200, 8 rows (us, beside cuBLAS): 8B qkv 15.5 / 15.6, o 11.0 / 13.2, gate_up 49.7 / 54.4, down
27.0 / 30.8; 0.6B o 4.2 / 5.9, down 5.0 / 7.5.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["M"])
def skinny(
    x, w, bias, y, part, count, M, N, K, x_stride, y_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
    STAGES: tl.constexpr, BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of BN columns, split of K, tile of BM rows). part [SPLIT, M, N] fp32; count: zeros, left so."""
    if USE_PDL:
        gdc_launch_dependents()
    pid_n = tl.program_id(0)
    pid_k = tl.program_id(1)
    pid_m = tl.program_id(2)
    m = pid_m * BM + tl.arange(0, BM)
    n = pid_n.to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    span = (K // BK + SPLIT - 1) // SPLIT * BK
    first = pid_k * span
    last = tl.minimum(first + span, K)
    w_rows = w + tl.minimum(n, N - 1)[:, None] * K + k[None, :]
    x_rows = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    live = m[:, None] < M
    if USE_PDL:
        gdc_wait()
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    for k0 in tl.range(first, last, BK, num_stages=STAGES):
        wt = tl.load(w_rows + k0, eviction_policy="evict_first")
        xt = tl.load(x_rows + k0, mask=live, other=0.0)
        if SWAP:
            acc = tl.dot(wt, xt.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(xt, wt.T, acc, input_precision="ieee")
    m64 = m.to(tl.int64)
    if SWAP:
        keep = (n[:, None] < N) & (m[None, :] < M)
        at = n[:, None] + m64[None, :] * N
        out_at = n[:, None] + m64[None, :] * y_stride
    else:
        keep = (m[:, None] < M) & (n[None, :] < N)
        at = m64[:, None] * N + n[None, :]
        out_at = m64[:, None] * y_stride + n[None, :]
    last_to_finish = True
    if SPLIT > 1:
        tl.store(part + tl.cast(pid_k, tl.int64) * M * N + at, acc, mask=keep)
        tl.debug_barrier()
        tile = pid_m * tl.num_programs(0) + pid_n
        done = tl.atomic_add(count + tile, 1, sem="acq_rel", scope="gpu")
        last_to_finish = done == SPLIT - 1
        if last_to_finish:
            tl.store(count + tile, 0)
            acc = tl.zeros_like(acc)
            for s in tl.static_range(SPLIT):
                acc += tl.load(part + tl.cast(s, tl.int64) * M * N + at, mask=keep, other=0.0, cache_modifier=".cg")
    if last_to_finish:
        if BIAS:
            b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
            if SWAP:
                acc += b[:, None]
            else:
                acc += b[None, :]
        tl.store(y + out_at, acc.to(y.dtype.element_ty), mask=keep)
