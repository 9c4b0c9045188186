"""Mixture of experts: tokens grouped by expert on the GPU, two grouped products, one weighted sum.

Every (token, choice) pair gets a place in a list sorted by expert and padded per expert to whole row tiles, so that
each tile of a product reads one expert's weights. The list is built in two launches over parts of the pairs, counts
first, then places: no sort, no atomics (results do not depend on timing), nothing waits for the device. Gate and up are
computed side by side in one program and leave as silu(gate) * up. A handful of tokens takes the shorter way of
`direct.py`, the rest of a decode step that of `small.py`; a shared expert rides along in both.
Sources: vLLM's fused_moe and its H200 tile choices.
Measured on an H200, 64 experts of 1,536 x 512, 6 a token (tests/bench/results/kernels.json): 64 tokens by a sorted list
in 93 us (76 % of the copy rate for the weights reached), 8,192 in 585 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engram_kernels.experts.direct import down_pairs, gate_up_pairs
from engram_kernels.experts.plan import Choice, Direct, Grouped, Small, plan
from engram_kernels.experts.small import down_small, gate_up_small, list_tokens
from engram_kernels.gated_linear.kernel import gated_linear
from engram_kernels.launch import dependent_launch, next_power_of_2
from engram_kernels.linear.kernel import linear

SCAN = 128
"""Pairs that one program of the grouping counts and places."""


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, EP: tl.constexpr, SCAN: tl.constexpr, USE_PDL: tl.constexpr):
    """Program (part): how often each expert is chosen in SCAN pairs, into counts [parts, EP]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    i = part * SCAN + tl.arange(0, SCAN)
    others = tl.arange(0, EP)
    chosen = tl.load(ids + i, mask=i < pairs, other=-1)
    tl.store(counts + part * EP + others, tl.sum((chosen[:, None] == others[None, :]).to(tl.int32), 0))


@triton.jit(do_not_specialize=["pairs", "parts"])
def _place(
    ids, counts, totals, order, tile_expert, pairs, parts,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, SCAN: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (part): its pairs, in order, into the tiles of their experts in `order`; the first E programs also pad
    an expert's last tile (with `pairs`), name the expert of its tiles and store its total."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    others = tl.arange(0, EP)
    before = tl.zeros((EP,), tl.int32)
    total = tl.zeros((EP,), tl.int32)
    for first in range(0, parts, ROWS):
        row = first + tl.arange(0, ROWS)
        each = tl.load(counts + row[:, None] * EP + others[None, :], mask=(row < parts)[:, None], other=0)
        total += tl.sum(each, 0)
        before += tl.sum(tl.where((row < part)[:, None], each, 0), 0)
    tiles = (total + BM - 1) // BM
    begin = (tl.cumsum(tiles, 0) - tiles) * BM  # first place of each expert
    for e in range(part, E, tl.num_programs(0)):
        mine = tl.sum(tl.where(others == e, tiles, 0), 0)
        count = tl.sum(tl.where(others == e, total, 0), 0)
        place = tl.sum(tl.where(others == e, begin, 0), 0)
        tl.store(totals + e, count)
        for tile in range(place // BM, place // BM + mine):
            tl.store(tile_expert + tile, e)
        if mine > 0:
            last = place + (mine - 1) * BM + tl.arange(0, BM)
            tl.store(order + last, tl.zeros((BM,), tl.int32) + pairs, mask=last >= place + count)
    i = part * SCAN + tl.arange(0, SCAN)
    chosen = tl.load(ids + i, mask=i < pairs, other=-1)
    hit = chosen[:, None] == others[None, :]
    rank = tl.cumsum(hit.to(tl.int32), 0) - 1
    at = tl.sum(tl.where(hit, rank + (begin + before)[None, :], 0), 1)
    tl.store(order + at, i, mask=i < pairs)


@triton.jit(do_not_specialize=["pairs"])
def _gate_up(
    x, w, hidden, order, tile_expert, counts, pairs, x_stride,
    TOP: tl.constexpr, M: tl.constexpr, F: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row tile, column tile): silu(gate) * up of BM pairs into hidden [places, F]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    others = tl.arange(0, EP)
    used = tl.sum((tl.load(counts + others, mask=others < E, other=0) + BM - 1) // BM, 0)
    if tile < used:
        e = tl.load(tile_expert + tile).to(tl.int64)
        place = tile * BM + tl.arange(0, BM)
        pair = tl.load(order + place)
        token = (pair // TOP).to(tl.int64)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        x_at = x + token[:, None] * x_stride + k[None, :]
        w_at = w + e * (2 * F * M) + tl.minimum(n, F - 1)[:, None] * M + k[None, :]
        live = (pair < pairs)[:, None]
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k0 in tl.range(0, M, BK, num_stages=STAGES):
            inside = k[None, :] < M - k0
            xt = tl.load(x_at + k0, mask=live & inside, other=0.0)
            gate = tl.dot(xt, tl.load(w_at + k0, mask=inside, other=0.0).T, gate, input_precision="ieee")
            up = tl.dot(xt, tl.load(w_at + F * M + k0, mask=inside, other=0.0).T, up, input_precision="ieee")
        value = gate / (1.0 + tl.exp(-gate)) * up
        at = hidden + place.to(tl.int64)[:, None] * F + n[None, :]
        tl.store(at, value.to(hidden.dtype.element_ty), mask=live & (n[None, :] < F))


@triton.jit(do_not_specialize=["pairs"])
def _down(
    hidden, w, weights, out, order, tile_expert, counts, pairs,
    M: tl.constexpr, F: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row tile, column tile): weighted outputs of BM pairs into out [pairs, M]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    others = tl.arange(0, EP)
    used = tl.sum((tl.load(counts + others, mask=others < E, other=0) + BM - 1) // BM, 0)
    if tile < used:
        e = tl.load(tile_expert + tile).to(tl.int64)
        place = tile * BM + tl.arange(0, BM)
        pair = tl.load(order + place)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        h_at = hidden + place.to(tl.int64)[:, None] * F + k[None, :]
        w_at = w + e * (M * F) + tl.minimum(n, M - 1)[:, None] * F + k[None, :]
        live = (pair < pairs)[:, None]
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in tl.range(0, F, BK, num_stages=STAGES):
            inside = k[None, :] < F - k0
            ht = tl.load(h_at + k0, mask=live & inside, other=0.0)
            acc = tl.dot(ht, tl.load(w_at + k0, mask=inside, other=0.0).T, acc, input_precision="ieee")
        acc = acc * tl.load(weights + pair, mask=pair < pairs, other=0.0)[:, None]
        at = out + pair.to(tl.int64)[:, None] * M + n[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=live & (n[None, :] < M))


@triton.jit
def _sum(
    parts, base, y, pairs,
    M: tl.constexpr, TOP: tl.constexpr, NS: tl.constexpr, BLOCK: tl.constexpr, BASE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, part): sum over the token's choices, in order, its NS slices of a shared expert (after all
    pairs), plus base [T, M]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP):
        total += tl.load(parts + (t * TOP + i) * M + m, mask=m < M, other=0.0).to(tl.float32)
    for j in tl.static_range(NS):
        total += tl.load(parts + (pairs + t * NS + j) * M + m, mask=m < M, other=0.0).to(tl.float32)
    if BASE:
        total += tl.load(base + t * M + m, mask=m < M, other=0.0).to(tl.float32)
    tl.store(y + t * M + m, total.to(y.dtype.element_ty), mask=m < M)


def experts(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    ids: Tensor,
    base: Tensor | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x [T, M], w_in [E, 2F, M], w_out [E, M, F] contiguous, weights and ids [T, k], base [T, M] or None, shared
    ([2S, M], [M, S]) or None -> [T, M]; as the reference."""
    tokens, width = x.shape
    if not tokens:
        return torch.empty_like(x)
    count, _, inner = w_out.shape
    shared_width = 0 if shared is None else shared[1].shape[1]
    choice = plan(tokens, ids.shape[1], count, width, inner, shared_width, x.dtype)
    return run(choice, x, w_in, w_out, weights, ids, base, shared)


def run(
    choice: Choice,
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    ids: Tensor,
    base: Tensor | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `experts`, for at least one token, in the way that `choice` names."""
    tokens, width = x.shape
    count, _, inner = w_out.shape
    top = ids.shape[1]
    pairs = tokens * top
    x = x if x.stride(1) == 1 else x.contiguous()
    ids, weights = ids.contiguous(), weights.float().contiguous()
    slices = 0
    if shared is not None:
        fits = not isinstance(choice, Grouped) and shared[1].shape[1] % inner == 0
        if fits and all(weight.is_contiguous() for weight in shared):
            slices = shared[1].shape[1] // inner
        else:
            always = linear(gated_linear(x, shared[0]), shared[1])
            base = always if base is None else base + always
    some_base = x if base is None else base.contiguous()
    extra_in, extra_out = shared if shared is not None and slices else (w_in, w_out)
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    pdl = dependent_launch(x)
    kwargs = {"launch_pdl": True} if pdl else {}
    rows = pairs + tokens * slices
    parts = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if isinstance(choice, Direct):
        hidden = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
        gate_up_pairs[(rows, -(-inner // choice.bn))](
            x, w_in, extra_in, hidden, ids, pairs, x.stride(0), top, slices, width, next_power_of_2(width), inner,
            choice.bn, pdl, num_warps=choice.warps, **kwargs,
        )  # fmt: skip
        down_pairs[(rows, -(-width // choice.bn_down))](
            hidden, w_out, extra_out, weights, ids, parts, pairs, slices, width, inner, next_power_of_2(inner),
            choice.bn_down, pdl, num_warps=choice.warps, **kwargs,
        )  # fmt: skip
    elif isinstance(choice, Small):
        hidden = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
        room = next_power_of_2(tokens)  # a constant of the kernels: not each number of tokens is to be compiled
        lanes = count + slices * -(-tokens // choice.bm)
        lists = torch.empty(lanes, room, dtype=torch.int32, device=x.device)
        counts = torch.empty(lanes, dtype=torch.int32, device=x.device)
        list_tokens[(lanes,)](
            ids, lists, counts, tokens, pairs, count, slices, room, choice.bm, next_power_of_2(pairs), pdl,
            num_warps=1, **kwargs,
        )  # fmt: skip
        shape = (width, inner, count, room, choice.bm)
        gate_up_small[(-(-inner // choice.bn), lanes)](
            x, w_in, extra_in, hidden, lists, counts, pairs, x.stride(0), top, slices, *shape, choice.bn,
            choice.bk, choice.stages, pdl, num_warps=choice.warps, **kwargs,
        )  # fmt: skip
        down_small[(-(-width // choice.bn_down), lanes)](
            hidden, w_out, extra_out, weights, parts, lists, counts, pairs, slices, *shape, choice.bn_down,
            choice.bk, choice.stages, pdl, num_warps=choice.warps, **kwargs,
        )  # fmt: skip
    else:
        _grouped(choice, x, w_in, w_out, weights, ids, parts)
    _sum[(tokens, -(-width // 1024))](
        parts, some_base, y, pairs, width, top, slices, 1024, base is not None, pdl, num_warps=4, **kwargs
    )
    return y


def _grouped(
    choice: Grouped, x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, ids: Tensor, parts: Tensor
) -> None:
    """Weighted outputs of all pairs into parts [pairs, M], by way of a list sorted by expert."""
    tokens, width = x.shape
    count, _, inner = w_out.shape
    top = ids.shape[1]
    pairs = tokens * top
    pdl = dependent_launch(x)
    kwargs = {"launch_pdl": True} if pdl else {}
    bm = choice.bm
    tiles = min(pairs, count + pairs // bm)
    padded = next_power_of_2(count)
    scan = max(16, min(SCAN, next_power_of_2(pairs)))
    groups = -(-pairs // scan)
    counts = torch.empty(groups, padded, dtype=torch.int32, device=x.device)
    totals = torch.empty(count, dtype=torch.int32, device=x.device)
    order = torch.empty(tiles * bm, dtype=torch.int32, device=x.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=x.device)
    hidden = torch.empty(tiles * bm, inner, dtype=x.dtype, device=x.device)
    _count[(groups,)](ids, counts, pairs, padded, scan, pdl, num_warps=4, **kwargs)
    # As many programs as experts where the parts are fewer: one that names many experts' tiles takes microseconds.
    _place[(max(groups, count),)](
        ids, counts, totals, order, tile_expert, pairs, groups, count, padded, bm, scan, min(32, 4096 // padded), pdl,
        num_warps=4, **kwargs,
    )  # fmt: skip
    _gate_up[(tiles, -(-inner // choice.bn))](
        x, w_in, hidden, order, tile_expert, totals, pairs, x.stride(0), top, width, inner, count, padded, bm,
        choice.bn, choice.bk, choice.stages, pdl, num_warps=choice.warps, **kwargs,
    )  # fmt: skip
    _down[(tiles, -(-width // choice.bn_down))](
        hidden, w_out, weights, parts, order, tile_expert, totals, pairs, width, inner, count, padded, bm,
        choice.bn_down, choice.bk, choice.stages, pdl, num_warps=choice.warps, **kwargs,
    )  # fmt: skip
