"""Experts for very few tokens: each (token, choice) pair reads its expert directly, nothing is sorted or summed later.

At one token the grouped form spends more time on four short launches than on reading weights. Here gate and up of a
pair are dot products over whole weight rows, and the down projection of a token adds its experts in one program, in
order. A weight that two tokens share is read twice (the second time from the L2): for a handful of tokens only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gate_up_pairs(
    x, w, hidden, ids, x_stride,
    TOP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (pair, column tile): BN values of silu(gate) * up into hidden [pairs, F]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = tl.arange(0, MP)
    e = tl.load(ids + pair).to(tl.int64)
    rows = w + e * (2 * F * M) + tl.minimum(n, F - 1)[:, None] * M + m[None, :]
    inside = m[None, :] < M
    gate_w = tl.load(rows, mask=inside, other=0.0)
    up_w = tl.load(rows + F * M, mask=inside, other=0.0)
    value = tl.load(x + (pair // TOP).to(tl.int64) * x_stride + m, mask=m < M, other=0.0).to(tl.float32)[None, :]
    gate = tl.sum(gate_w.to(tl.float32) * value, 1)
    up = tl.sum(up_w.to(tl.float32) * value, 1)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(hidden + pair.to(tl.int64) * F + n, out.to(hidden.dtype.element_ty), mask=n < F)


@triton.jit
def down_tokens(
    hidden, w, weights, ids, base, y,
    TOP: tl.constexpr, M: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BN: tl.constexpr, BASE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, column tile): BN outputs, the weighted sum over the token's experts (+ base), into y."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    f = tl.arange(0, FP)
    total = tl.zeros((BN,), tl.float32)
    for i in tl.static_range(TOP):
        pair = t * TOP + i
        e = tl.load(ids + pair).to(tl.int64)
        rows = w + e * (M * F) + tl.minimum(n, M - 1)[:, None] * F + f[None, :]
        w_tile = tl.load(rows, mask=f[None, :] < F, other=0.0).to(tl.float32)
        value = tl.load(hidden + pair * F + f, mask=f < F, other=0.0).to(tl.float32)
        total += tl.sum(w_tile * value[None, :], 1) * tl.load(weights + pair)
    if BASE:
        total += tl.load(base + t * M + n, mask=n < M, other=0.0).to(tl.float32)
    tl.store(y + t * M + n, total.to(y.dtype.element_ty), mask=n < M)
