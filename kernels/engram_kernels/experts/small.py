"""Experts for the tokens of a decode step: a list of tokens per expert, then a program per expert and column tile.

At a few hundred (token, choice) pairs a list sorted over all experts costs more time to make than it saves. Here every
expert has room for all tokens, so one launch makes all lists and none depends on another's length. The slices of a
shared expert, which every token takes, ride along: each is a few more experts of the same width and the same weights,
one for every BM tokens, or one program would compute all of their row tiles in turn while the others are done.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["tokens", "pairs"])
def list_tokens(
    ids, lists, counts, tokens, pairs,
    E: tl.constexpr, NS: tl.constexpr, ROOM: tl.constexpr, BM: tl.constexpr, PP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (expert or rider): its pairs in order into lists [E + riders, ROOM], how many into counts. Rider i is BM
    tokens, those from i // NS * BM on, in slice i % NS of a shared expert, whose pairs are pairs + token * NS + slice.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    p = tl.arange(0, PP)
    if e < E:
        hit = (tl.load(ids + p, mask=p < pairs, other=-1) == e).to(tl.int32)
        # A token without a place may hold anything and name an expert twice: what has no room is nobody's.
        place = tl.cumsum(hit, 0) - 1
        tl.store(lists + e * ROOM + place, p, mask=(hit > 0) & (place < ROOM))
        tl.store(counts + e, tl.minimum(tl.sum(hit, 0), ROOM))
    else:
        slices: tl.constexpr = NS if NS > 0 else 1
        first = (e - E) // slices * BM
        i = tl.arange(0, BM)
        tl.store(lists + e * ROOM + i, pairs + (first + i) * NS + (e - E) % slices, mask=first + i < tokens)
        tl.store(counts + e, tl.minimum(tl.maximum(tokens - first, 0), BM))


@triton.jit
def _token(pair, pairs, TOP: tl.constexpr, NS: tl.constexpr):
    slices: tl.constexpr = NS if NS > 0 else 1
    return tl.where(pair < pairs, pair // TOP, (pair - pairs) // slices)


@triton.jit(do_not_specialize=["pairs"])
def gate_up_small(
    x, w, shared, hidden, lists, counts, pairs, x_stride,
    TOP: tl.constexpr, NS: tl.constexpr, M: tl.constexpr, F: tl.constexpr, E: tl.constexpr, ROOM: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (column tile, expert or rider): silu(gate) * up into hidden [pairs + tokens * NS, F]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.num_programs(1) - 1 - tl.program_id(1)  # riders have most tokens: they start first
    count = tl.load(counts + e)
    i = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = tl.minimum(n, F - 1)[:, None] * M + k[None, :]
    w_at = w + tl.cast(e, tl.int64) * (2 * F * M) + rows
    up_at = w_at + F * M
    if NS > 0:  # noqa: SIM102 - the inner test is made on the GPU, the outer one when the kernel is compiled
        if e >= E:
            w_at = shared + (e - E) % NS * (F * M) + rows
            up_at = w_at + NS * F * M
    for first in range(0, count, BM):
        pair = tl.load(lists + e * ROOM + first + i, mask=first + i < count, other=0)
        live = (first + i < count)[:, None]
        token = _token(pair, pairs, TOP, NS).to(tl.int64)
        x_at = x + token[:, None] * x_stride + k[None, :]
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k0 in tl.range(0, M, BK, num_stages=STAGES):
            inside = k[None, :] < M - k0
            xt = tl.load(x_at + k0, mask=live & inside, other=0.0)
            gate = tl.dot(xt, tl.load(w_at + k0, mask=inside, other=0.0).T, gate, input_precision="ieee")
            up = tl.dot(xt, tl.load(up_at + k0, mask=inside, other=0.0).T, up, input_precision="ieee")
        value = gate / (1.0 + tl.exp(-gate)) * up
        at = hidden + pair.to(tl.int64)[:, None] * F + n[None, :]
        tl.store(at, value.to(hidden.dtype.element_ty), mask=live & (n[None, :] < F))


@triton.jit(do_not_specialize=["pairs"])
def down_small(
    hidden, w, shared, weights, out, lists, counts, pairs,
    NS: tl.constexpr, M: tl.constexpr, F: tl.constexpr, E: tl.constexpr, ROOM: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (column tile, expert or rider): weighted outputs into out [pairs + tokens * NS, M]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.num_programs(1) - 1 - tl.program_id(1)  # riders have most tokens: they start first
    count = tl.load(counts + e)
    i = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row = tl.minimum(n, M - 1)[:, None]
    w_at = w + tl.cast(e, tl.int64) * (M * F) + row * F + k[None, :]
    if NS > 0:  # noqa: SIM102 - the inner test is made on the GPU, the outer one when the kernel is compiled
        if e >= E:
            w_at = shared + (e - E) % NS * F + row * (NS * F) + k[None, :]
    for first in range(0, count, BM):
        pair = tl.load(lists + e * ROOM + first + i, mask=first + i < count, other=0)
        live = (first + i < count)[:, None]
        h_at = hidden + pair.to(tl.int64)[:, None] * F + k[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in tl.range(0, F, BK, num_stages=STAGES):
            inside = k[None, :] < F - k0
            ht = tl.load(h_at + k0, mask=live & inside, other=0.0)
            acc = tl.dot(ht, tl.load(w_at + k0, mask=inside, other=0.0).T, acc, input_precision="ieee")
        acc = acc * tl.load(weights + pair, mask=pair < pairs, other=1.0)[:, None]
        at = out + pair.to(tl.int64)[:, None] * M + n[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=live & (n[None, :] < M))
