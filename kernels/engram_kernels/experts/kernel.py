"""Mixture of experts: tokens grouped by expert on the GPU, two grouped products, one weighted sum.

Every (token, choice) pair gets a place in a list sorted by expert and padded per expert to whole row tiles, so that
each tile of a product reads one expert's weights. The list is built by one program per expert that scans the choices
twice: no sort, no atomics (results do not depend on timing), nothing waits for the device. Gate and up are computed
side by side in one program and leave as silu(gate) * up. A handful of tokens takes the shorter way of `direct.py`.
Sources: vLLM's fused_moe and its H200 tile choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engram_kernels.experts.direct import down_tokens, gate_up_pairs
from engram_kernels.launch import dependent_launch, next_power_of_2
from engram_kernels.tuning import tuned

SCAN = 1024


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, SCAN: tl.constexpr, USE_PDL: tl.constexpr):
    """Program (expert): how many pairs chose it."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    total = tl.zeros((SCAN,), tl.int32)
    for first in range(0, pairs, SCAN):
        i = first + tl.arange(0, SCAN)
        total += (tl.load(ids + i, mask=i < pairs, other=-1) == e).to(tl.int32)
    tl.store(counts + e, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pairs"])
def _place(
    ids, counts, order, tile_expert, pairs,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, SCAN: tl.constexpr, FEW: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (expert): its pairs, in order, into its tiles of `order` (padded with `pairs`); its tiles' expert.

    FEW: there are at most FEW pairs and every program counts all experts itself, which saves a launch; 0: many.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    others = tl.arange(0, EP)
    if FEW > 0:
        i = tl.arange(0, FEW)
        chosen = tl.load(ids + i, mask=i < pairs, other=-1)
        each = tl.sum((chosen[None, :] == others[:, None]).to(tl.int32), 1)
        tl.store(counts + others, each, mask=others == e)
    else:
        each = tl.load(counts + others, mask=others < E, other=0)
    tiles = (each + BM - 1) // BM
    first_tile = tl.sum(tl.where(others < e, tiles, 0), 0)
    mine = tl.sum(tl.where(others == e, tiles, 0), 0)
    count = tl.sum(tl.where(others == e, each, 0), 0)
    for tile in range(first_tile, first_tile + mine):
        tl.store(tile_expert + tile, e)
    row = tl.arange(0, BM)
    if mine > 0:
        last = (first_tile + mine - 1) * BM
        tl.store(order + last + row, tl.zeros((BM,), tl.int32) + pairs, mask=last + row >= first_tile * BM + count)
        found = 0
        for first in range(0, pairs, SCAN):
            at = first + tl.arange(0, SCAN)
            hit = tl.load(ids + at, mask=at < pairs, other=-1) == e
            rank = tl.cumsum(hit.to(tl.int32), 0)
            tl.store(order + first_tile * BM + found + rank - 1, at, mask=hit)
            found += tl.sum(hit.to(tl.int32), 0)


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
def _sum(parts, y, M: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """Program (token, part): sum over the token's choices, in order."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP):
        total += tl.load(parts + (t * TOP + i) * M + m, mask=m < M, other=0.0).to(tl.float32)
    tl.store(y + t * M + m, total.to(y.dtype.element_ty), mask=m < M)


def experts(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """x [T, M], w_in [E, 2F, M], w_out [E, M, F] contiguous, weights and ids [T, k] -> [T, M]; as the reference."""
    tokens, width = x.shape
    count, _, inner = w_out.shape
    top = ids.shape[1]
    pairs = tokens * top
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    ids, weights = ids.contiguous(), weights.float().contiguous()
    pdl = dependent_launch(x)
    kwargs = {"launch_pdl": True} if pdl else {}
    direct = tuned("experts", {"size": "direct"})
    if tokens <= direct["tokens"] and width <= 8192:
        hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
        gate_up_pairs[(pairs, -(-inner // direct["bn"]))](
            x, w_in, hidden, ids, x.stride(0), top, width, next_power_of_2(width), inner, direct["bn"], pdl,
            num_warps=direct["warps"], **kwargs,
        )  # fmt: skip
        down_tokens[(tokens, -(-width // direct["bn_down"]))](
            hidden, w_out, weights, ids, y, top, width, inner, next_power_of_2(inner), direct["bn_down"], pdl,
            num_warps=direct["warps"], **kwargs,
        )  # fmt: skip
        return y
    per_expert = pairs / count
    size = "decode" if per_expert <= 16 else "chunk" if per_expert <= 96 else "prefill"
    config = tuned("experts", {"size": size})
    bm = config["bm"]
    tiles = min(pairs, count + pairs // bm)
    padded = next_power_of_2(count)
    counts = torch.empty(count, dtype=torch.int32, device=x.device)
    order = torch.empty(tiles * bm, dtype=torch.int32, device=x.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=x.device)
    hidden = torch.empty(tiles * bm, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    few = max(16, next_power_of_2(pairs)) if pairs <= 256 else 0
    scan = few or SCAN
    if not few:
        _count[(count,)](ids, counts, pairs, SCAN, pdl, num_warps=4, **kwargs)
    _place[(count,)](ids, counts, order, tile_expert, pairs, count, padded, bm, scan, few, pdl, num_warps=4, **kwargs)
    _gate_up[(tiles, -(-inner // config["bn"]))](
        x, w_in, hidden, order, tile_expert, counts, pairs, x.stride(0), top, width, inner, count, padded, bm,
        config["bn"], config["bk"], config["stages"], pdl, num_warps=config["warps"], **kwargs,
    )  # fmt: skip
    _down[(tiles, -(-width // config["bn_down"]))](
        hidden, w_out, weights, parts, order, tile_expert, counts, pairs, width, inner, count, padded, bm,
        config["bn_down"], config["bk"], config["stages"], pdl, num_warps=config["warps"], **kwargs,
    )  # fmt: skip
    _sum[(tokens, -(-width // 1024))](parts, y, width, top, 1024, pdl, num_warps=4, **kwargs)
    return y
