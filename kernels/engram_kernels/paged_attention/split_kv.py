"""Paged flash decoding with split KV: one launch for any mix of lengths, and short chunks on long histories too.

Decode reads every key once and computes little, so it must fill the card with reads whatever the lengths are. The keys
of all sequences are cut into about `target` equal pieces; each program derives the whole cut from the sequence lengths
on the GPU (a scan over at most a few hundred integers), so the grid depends on the batch size only and one CUDA graph
serves every length. A program takes one piece for one KV head and all its query heads, padded to 16 rows for the tensor
cores. With QB > 1 a program takes QB tokens of one sequence at once: a turn of 40 new tokens on a long history would
leave most of the card idle in the prefill kernel.

Sources: flash decoding (Dao et al. 2023), the GPU-side split of sglang's `num_kv_splits`, our prototype's figures.
Learned there: a page number loaded in the same iteration as its keys costs a pipeline stage, so it is loaded one tile
ahead; scores must keep queries on the left of the product (keys on the left with tile 64 and 4 warps are silently wrong
on Triton 3.6 / Hopper and right in the interpreter; tests/gpu/test_triton_hazards.py watches it).
Measured on an H200, attend and combine, 8 KV heads x 128, group 4 (tests/bench/results/kernels.json): batch 1 at 512 /
2k / 8k / 32k 5.3 / 8.3 / 15.1 / 40.1 us; batch 64 at 512 / 2k / 8k 82 / 95 / 101 % of the copy rate; 40 new tokens on
2,500 in 20 us. Planning before the wait on the previous kernel took 1 to 3 us off every small case.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engram_kernels.rope_append.kernel import rotated_heads

FAR = tl.constexpr(-1e30)  # finite: a row that sees no key yet must not make NaN out of inf - inf


@triton.jit
def _cut(query_start, seq_lens, seq0, num_seqs, target, SP: tl.constexpr, QB: tl.constexpr, UNIT: tl.constexpr):
    """The plan, per sequence [SP]: query blocks, pieces per block, first task after the sequence's last."""
    s = tl.arange(0, SP)
    live = s < num_seqs
    length = tl.load(seq_lens + seq0 + s, mask=live, other=0)
    if QB == 1:
        blocks = live.to(tl.int32)
    else:
        first = tl.load(query_start + seq0 + s, mask=live, other=0)
        blocks = (tl.load(query_start + seq0 + s + 1, mask=live, other=0) - first + QB - 1) // QB
    units = (length + UNIT - 1) // UNIT
    chunk = tl.maximum((tl.sum(blocks * units) + target - 1) // target, 1)
    pieces = tl.maximum((units + chunk - 1) // chunk, 1)
    return blocks, pieces, tl.cumsum(blocks * pieces, 0)


@triton.jit
def _pick(values, s, SP: tl.constexpr):
    """Element s of a register vector."""
    return tl.sum(tl.where(tl.arange(0, SP) == s, values, 0))


@triton.jit
def _tile(
    q, k_at, v_at, page, n0, hi, limit, h, m, den, acc, scale,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One tile of keys: scores [rows, BN], running maximum m, sum den, weighted values acc [rows, DP]."""
    n = n0 + tl.arange(0, BN)
    d = tl.arange(0, DP)
    at = ((page.to(tl.int64) * H + h) * 16 + n % 16)[:, None] * D + d[None, :]
    if MASK or DP != D:
        keep = (n[:, None] < hi) & (d[None, :] < D)
        k = tl.load(k_at + at, mask=keep, other=0.0)
        v = tl.load(v_at + at, mask=keep, other=0.0)
    else:
        k = tl.load(k_at + at)
        v = tl.load(v_at + at)
    scores = tl.dot(q, k.T, input_precision="ieee") * scale
    if MASK:
        scores = tl.where(n[None, :] < limit[:, None], scores, FAR)
    top = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - top[:, None])
    fade = tl.exp2(m - top)
    den = den * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return top, den, acc


@triton.jit
def _append(
    k, v, k_at, v_at, positions, slots, cos_sin, k_weight, row, stride, h, eps,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Key and value head h of one token, normed and rotated, into the cache; a negative slot appends nothing."""
    one = h + tl.arange(0, 1)
    d = tl.arange(0, DP)
    cos = cos_sin
    if HALF > 0:
        cos = cos_sin + tl.load(positions + row) * (2 * HALF)
    key = rotated_heads(k + row * stride, D, k_weight, cos, cos + HALF, one, H, eps, D, DP, HALF, NORM)
    value = tl.load(v + row * stride + one[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
    slot = tl.load(slots + row)
    at = ((slot // 16 * H + one) * 16 + slot % 16)[:, None] * D + d[None, :]
    keep = (d[None, :] < D) & (slot >= 0)
    tl.store(k_at + at, key.to(k_at.dtype.element_ty), mask=keep)
    tl.store(v_at + at, value.to(v_at.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["num_blocks", "table_stride", "table_width", "seq0", "num_seqs", "target"])
def attend(
    q, kv, out, part, lse, query_start, seq_lens, block_tables, k, v, positions, slots, cos_sin, q_weight, k_weight,
    num_blocks, table_stride, table_width, seq0, num_seqs, target, q_stride, k_stride, scale, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, SP: tl.constexpr,
    QB: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr, FRESH: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, t): piece t of the plan for KV head h. Rows are (token, query head of the group).

    A sequence in one piece is written to out [T, H * G, D]; otherwise the piece's normalised result goes to
    part [tasks, H, QB * G, D] and the log2 of its weight to lse [tasks, H, QB * G], for `combine`.
    FRESH (decodes only): q, k, v come as they were projected. Every program norms and rotates its own queries; the one
    whose piece ends the sequence appends the new key and value before it reads the cache, no other reads them.
    """
    if USE_PDL:
        gdc_launch_dependents()
    h = tl.program_id(0)
    t = tl.program_id(1)
    # The plan reads the step's metadata only, which is complete before the step's first launch: no wait yet.
    blocks_s, pieces_s, end_s = _cut(query_start, seq_lens, seq0, num_seqs, target, SP, QB, UNIT)
    s = tl.sum((end_s <= t).to(tl.int32))
    if s < num_seqs:
        length = tl.load(seq_lens + seq0 + s)
        pieces = _pick(pieces_s, s, SP)
        if QB == 1:
            local = t - (_pick(end_s, s, SP) - pieces)
            q0 = seq0 + s  # decodes are the step's first tokens, one each
            new = 1
        else:
            local = t - (_pick(end_s, s, SP) - _pick(blocks_s, s, SP) * pieces)
            q0 = tl.load(query_start + seq0 + s)
            new = tl.load(query_start + seq0 + s + 1) - q0
        block = local // pieces
        piece = local % pieces
        start = length - new + block * QB  # position of the block's first token
        span = ((length + UNIT - 1) // UNIT + pieces - 1) // pieces * UNIT
        lo = tl.minimum(piece * span, length)
        hi = tl.minimum(tl.minimum(lo + span, length), start + QB)

        r = tl.arange(0, ROWS)
        d = tl.arange(0, DP)
        token = block * QB + r // G
        live = (r < QB * G) & (token < new)
        limit = start + r // G + 1  # keys a row may see
        row = (q0 + token).to(tl.int64)
        head = h * G + r % G
        keep = live[:, None] & (d[None, :] < D)
        pages = block_tables + (seq0 + s).to(tl.int64) * table_stride
        last = tl.maximum(tl.minimum(hi, table_width * 16) - 1, 0)
        n = tl.arange(0, BN)
        page = tl.load(pages + tl.minimum(lo + n, last) // 16)
        k_at = kv
        v_at = kv + num_blocks.to(tl.int64) * (H * 16 * D)
        if USE_PDL:
            gdc_wait()
        if FRESH:
            if (hi == length) & (lo < hi):
                _append(
                    k, v, k_at, v_at, positions, slots, cos_sin, k_weight, tl.cast(q0, tl.int64), k_stride, h, eps, H,
                    D, DP, HALF, NORM,
                )  # fmt: skip
                tl.debug_barrier()
            cos = cos_sin
            if HALF > 0:
                cos = cos_sin + tl.load(positions + q0) * (2 * HALF)
            heads = tl.where(live, head, H * G)
            qt = rotated_heads(
                q + tl.cast(q0, tl.int64) * q_stride, D, q_weight, cos, cos + HALF, heads, H * G, eps, D, DP, HALF, NORM
            ).to(q.dtype.element_ty)
        else:
            qt = tl.load(q + row[:, None] * q_stride + head[:, None] * D + d[None, :], mask=keep, other=0.0)
        m = tl.full((ROWS,), FAR, tl.float32)
        den = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DP), tl.float32)

        whole = lo + tl.maximum(tl.minimum(hi, start + 1) - lo, 0) // BN * BN  # tiles every row sees in full
        for n0 in tl.range(lo, whole, BN, num_stages=STAGES):
            after = tl.load(pages + tl.minimum(n0 + BN + n, last) // 16)
            m, den, acc = _tile(qt, k_at, v_at, page, n0, hi, limit, h, m, den, acc, scale, H, D, DP, BN, False)
            page = after
        for n0 in tl.range(whole, hi, BN, num_stages=1):
            page = tl.load(pages + tl.minimum(n0 + n, last) // 16)
            m, den, acc = _tile(qt, k_at, v_at, page, n0, hi, limit, h, m, den, acc, scale, H, D, DP, BN, True)

        o = acc / tl.maximum(den, 1e-30)[:, None]
        if pieces == 1:
            at = row[:, None] * (H * G * D) + head[:, None] * D + d[None, :]
            tl.store(out + at, o.to(out.dtype.element_ty), mask=keep)
        else:
            slot = (t * H + h).to(tl.int64) * (QB * G) + r
            tl.store(part + slot[:, None] * D + d[None, :], o, mask=keep)
            tl.store(lse + slot, m + tl.log2(tl.maximum(den, 1e-30)), mask=live)


@triton.jit(do_not_specialize=["seq0", "num_seqs", "token0", "target"])
def combine(
    part, lse, out, query_start, seq_lens, seq0, num_seqs, token0, target,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, QB: tl.constexpr,
    UNIT: tl.constexpr, BS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, query head): merge the pieces of a sequence that `attend` split, BS pieces at a time."""
    if USE_PDL:
        gdc_launch_dependents()
    row = token0 + tl.program_id(0)
    head = tl.program_id(1)
    blocks_s, pieces_s, end_s = _cut(query_start, seq_lens, seq0, num_seqs, target, SP, QB, UNIT)
    if QB == 1:
        s = row - token0
    else:
        ends = tl.load(query_start + seq0 + 1 + tl.arange(0, SP), mask=tl.arange(0, SP) < num_seqs, other=2147483647)
        s = tl.sum((ends <= row).to(tl.int32))
    pieces = _pick(pieces_s, s, SP)
    if USE_PDL:
        gdc_wait()
    if (s < num_seqs) & (pieces > 1):
        local = row - tl.load(query_start + seq0 + s)
        t0 = _pick(end_s, s, SP) - (_pick(blocks_s, s, SP) - local // QB) * pieces
        slot0 = (t0.to(tl.int64) * H + head // G) * (QB * G) + local % QB * G + head % G
        p = tl.arange(0, BS)
        d = tl.arange(0, DP)
        m = FAR
        den = 0.0
        acc = tl.zeros((DP,), tl.float32)
        for p0 in range(0, pieces, BS):
            keep = p0 + p < pieces
            slot = slot0 + (p0 + p).to(tl.int64) * (H * QB * G)
            e = tl.load(lse + slot, mask=keep, other=FAR)
            # A piece past a token's own position has weight 2^-1e30 = 0 for it.
            o = tl.load(part + slot[:, None] * D + d[None, :], mask=keep[:, None] & (d[None, :] < D), other=0.0)
            top = tl.maximum(m, tl.max(e, 0))
            w = tl.exp2(e - top)
            fade = tl.exp2(m - top)
            den = den * fade + tl.sum(w, 0)
            acc = acc * fade + tl.sum(o * w[:, None], 0)
            m = top
        at = row.to(tl.int64) * (H * G * D) + head * D + d
        tl.store(out + at, (acc / den).to(out.dtype.element_ty), mask=d < D)
