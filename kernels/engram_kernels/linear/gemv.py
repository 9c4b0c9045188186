"""Linear layers of one to eight rows: whole weight rows in registers, no tensor cores, no second pass.

At these sizes a layer is bound by reading its weights. A program owns BN output columns: it issues all its weight
loads before it waits for the kernel that makes x (programmatic dependent launch), so the reads of one layer run under
the tail of the one before. Source: our PDL prototype, 97 to 101 % of the copy rate for the 8B layers at one row; the
same early trigger without weights in registers made the chain slower, and an L2 prefetch slower still.
Measured on an H200, one row (us, beside cuBLAS): 8B qkv 12.6 / 16.3, o 9.0 / 13.6, gate_up 45.8 / 49.8, down 23.8 /
30.8, head 274 / 298; 0.6B qkv 2.6 / 5.2, o 1.9 / 12.7, gate_up 3.7 / 5.9, down 2.3 / 7.4.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gemv(
    x, w, bias, y, N, x_stride, y_stride,
    M: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = x[m] . w[n] (+ bias[n]); K is covered by one to four tiles of BK."""
    if USE_PDL:
        gdc_launch_dependents()
    TILES: tl.constexpr = (K + BK - 1) // BK
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = w + tl.minimum(n, N - 1)[:, None] * K + k[None, :]  # past the end: the last row again, not stored
    w0 = tl.load(rows, mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")
    if TILES > 1:
        w1 = tl.load(rows + BK, mask=BK + k[None, :] < K, other=0.0, eviction_policy="evict_first")
    if TILES > 2:
        w2 = tl.load(rows + 2 * BK, mask=2 * BK + k[None, :] < K, other=0.0, eviction_policy="evict_first")
    if TILES > 3:
        w3 = tl.load(rows + 3 * BK, mask=3 * BK + k[None, :] < K, other=0.0, eviction_policy="evict_first")
    if BIAS:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    for m in tl.static_range(M):
        at = x + m * x_stride + k
        acc = w0.to(tl.float32) * tl.load(at, mask=k < K, other=0.0).to(tl.float32)[None, :]
        if TILES > 1:
            acc += w1.to(tl.float32) * tl.load(at + BK, mask=BK + k < K, other=0.0).to(tl.float32)[None, :]
        if TILES > 2:
            acc += w2.to(tl.float32) * tl.load(at + 2 * BK, mask=2 * BK + k < K, other=0.0).to(tl.float32)[None, :]
        if TILES > 3:
            acc += w3.to(tl.float32) * tl.load(at + 3 * BK, mask=3 * BK + k < K, other=0.0).to(tl.float32)[None, :]
        out = tl.sum(acc, axis=1)
        if BIAS:
            out += b
        tl.store(y + m * y_stride + n, out.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _row(w0, w1, w2, w3, at, k, K: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr):
    """x[at] . each weight row held in up to four tiles: [BN] fp32."""
    acc = w0.to(tl.float32) * tl.load(at, mask=k < K, other=0.0).to(tl.float32)[None, :]
    if TILES > 1:
        acc += w1.to(tl.float32) * tl.load(at + BK, mask=BK + k < K, other=0.0).to(tl.float32)[None, :]
    if TILES > 2:
        acc += w2.to(tl.float32) * tl.load(at + 2 * BK, mask=2 * BK + k < K, other=0.0).to(tl.float32)[None, :]
    if TILES > 3:
        acc += w3.to(tl.float32) * tl.load(at + 3 * BK, mask=3 * BK + k < K, other=0.0).to(tl.float32)[None, :]
    return tl.sum(acc, axis=1)


@triton.jit
def _tiles(rows, k, K: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr):
    """Up to four tiles of weight rows; a tile that does not exist is the first one again."""
    w0 = tl.load(rows, mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")
    w1 = w0
    w2 = w0
    w3 = w0
    if TILES > 1:
        w1 = tl.load(rows + BK, mask=BK + k[None, :] < K, other=0.0, eviction_policy="evict_first")
    if TILES > 2:
        w2 = tl.load(rows + 2 * BK, mask=2 * BK + k[None, :] < K, other=0.0, eviction_policy="evict_first")
    if TILES > 3:
        w3 = tl.load(rows + 3 * BK, mask=3 * BK + k[None, :] < K, other=0.0, eviction_policy="evict_first")
    return w0, w1, w2, w3


@triton.jit
def gated_gemv(
    x, w, bias, y, F, x_stride, y_stride,
    M: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """y[m, f] = silu(x[m] . w[f]) * (x[m] . w[F + f]), each product (+ bias); otherwise as `gemv`."""
    if USE_PDL:
        gdc_launch_dependents()
    TILES: tl.constexpr = (K + BK - 1) // BK
    f = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = w + tl.minimum(f, F - 1)[:, None] * K + k[None, :]
    g0, g1, g2, g3 = _tiles(rows, k, K, BK, TILES)
    u0, u1, u2, u3 = _tiles(rows + tl.cast(F, tl.int64) * K, k, K, BK, TILES)
    if BIAS:
        gate_bias = tl.load(bias + f, mask=f < F, other=0.0).to(tl.float32)
        up_bias = tl.load(bias + F + f, mask=f < F, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    for m in tl.static_range(M):
        at = x + m * x_stride + k
        gate = _row(g0, g1, g2, g3, at, k, K, BK, TILES)
        up = _row(u0, u1, u2, u3, at, k, K, BK, TILES)
        if BIAS:
            gate += gate_bias
            up += up_bias
        out = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(y + m * y_stride + f, out.to(y.dtype.element_ty), mask=f < F)
