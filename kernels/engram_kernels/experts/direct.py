"""Experts for very few tokens: each (token, choice) pair reads its expert directly, nothing is sorted.

At one token the grouped form spends more time on short launches than on reading weights. Here both projections of a
pair are dot products over whole weight rows, one program a pair and column tile; the sum over a token's pairs is a
launch of its own, because a program that adds them up reads one expert after the other (11 us at one token). A weight
that two tokens share is read twice (the second time from the L2): for a handful of tokens only.
A shared expert, which every token takes, is NS more choices of a token: slices of the experts' width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["pairs"])
def gate_up_pairs(
    x, w, shared, hidden, ids, pairs, x_stride,
    TOP: tl.constexpr, NS: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, F: tl.constexpr, BN: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (pair, column tile): BN values of silu(gate) * up into hidden [pairs + tokens * NS, F]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = tl.arange(0, MP)
    e = tl.load(ids + pair, mask=pair < pairs, other=0).to(tl.int64)
    token = pair // TOP
    at = tl.minimum(n, F - 1)[:, None] * M + m[None, :]
    rows = w + e * (2 * F * M) + at
    up_rows = rows + F * M
    if NS > 0:  # noqa: SIM102 - the inner test is made on the GPU, the outer one when the kernel is compiled
        if pair >= pairs:
            token = (pair - pairs) // NS
            rows = shared + (pair - pairs) % NS * (F * M) + at
            up_rows = rows + NS * F * M
    inside = m[None, :] < M
    gate_w = tl.load(rows, mask=inside, other=0.0)
    up_w = tl.load(up_rows, mask=inside, other=0.0)
    value = tl.load(x + token.to(tl.int64) * x_stride + m, mask=m < M, other=0.0).to(tl.float32)[None, :]
    gate = tl.sum(gate_w.to(tl.float32) * value, 1)
    up = tl.sum(up_w.to(tl.float32) * value, 1)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(hidden + pair.to(tl.int64) * F + n, out.to(hidden.dtype.element_ty), mask=n < F)


@triton.jit(do_not_specialize=["pairs"])
def down_pairs(
    hidden, w, shared, weights, ids, parts, pairs,
    NS: tl.constexpr, M: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (pair, column tile): BN weighted outputs of one pair into parts [pairs + tokens * NS, M]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    f = tl.arange(0, FP)
    e = tl.load(ids + pair, mask=pair < pairs, other=0).to(tl.int64)
    scale = tl.load(weights + pair, mask=pair < pairs, other=1.0)
    row = tl.minimum(n, M - 1)[:, None]
    rows = w + e * (M * F) + row * F + f[None, :]
    if NS > 0:  # noqa: SIM102 - the inner test is made on the GPU, the outer one when the kernel is compiled
        if pair >= pairs:
            rows = shared + (pair - pairs) % NS * F + row * (NS * F) + f[None, :]
    w_tile = tl.load(rows, mask=f[None, :] < F, other=0.0).to(tl.float32)
    value = tl.load(hidden + pair.to(tl.int64) * F + f, mask=f < F, other=0.0).to(tl.float32)
    total = tl.sum(w_tile * value[None, :], 1) * scale
    tl.store(parts + pair.to(tl.int64) * M + n, total.to(parts.dtype.element_ty), mask=n < M)
