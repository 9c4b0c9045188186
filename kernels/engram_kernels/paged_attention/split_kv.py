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
2,500 in 20 us. Planning before the wait on the previous kernel took 1 to 3 us off every small case. In a large batch
programs of one or two warps are faster than of four (the plan's sums need no barrier, more of them run at once), and
pieces an eighth or a quarter of what a multiprocessor reads keep one long sequence among 63 short ones from taking
twice the time (tests/bench/tune_kernels.py has both cases).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engram_kernels.rope_append.kernel import head_factors, load_heads, turned

FAR = tl.constexpr(-1e30)  # finite: a row that sees no key yet must not make NaN out of inf - inf
HIDDEN = tl.constexpr(-float(2**100))  # times the scale it stays exact, so that less its own maximum it is 0


@triton.jit
def _units(query_start, seq_lens, seq0, num_seqs, target, SP: tl.constexpr, QB: tl.constexpr, UNIT: tl.constexpr):
    """Per sequence [SP]: query blocks, units of keys; units of a piece."""
    s = tl.arange(0, SP)
    live = s < num_seqs
    length = tl.load(seq_lens + seq0 + s, mask=live, other=0)
    if QB == 1:
        blocks = live.to(tl.int32)
    else:
        first = tl.load(query_start + seq0 + s, mask=live, other=0)
        blocks = (tl.load(query_start + seq0 + s + 1, mask=live, other=0) - first + QB - 1) // QB
    units = (length + UNIT - 1) // UNIT
    return blocks, units, tl.maximum((tl.sum(blocks * units) + target - 1) // target, 1)


@triton.jit
def _cut(query_start, seq_lens, seq0, num_seqs, target, SP: tl.constexpr, QB: tl.constexpr, UNIT: tl.constexpr):
    """The plan, per sequence [SP]: query blocks, pieces per block, first task after the sequence's last."""
    blocks, units, chunk = _units(query_start, seq_lens, seq0, num_seqs, target, SP, QB, UNIT)
    pieces = _pieces(units, chunk)
    return blocks, pieces, tl.cumsum(blocks * pieces, 0)


@triton.jit
def _pieces(units, chunk):
    """Rounded: who is a little longer than a piece should be stays whole. Never more than `target` + one a block."""
    return tl.maximum((units + chunk // 2) // chunk, 1)


@triton.jit
def _pick(values, s, SP: tl.constexpr):
    """Element s of a register vector."""
    return tl.sum(tl.where(tl.arange(0, SP) == s, values, 0))


@triton.jit
def _tile(
    q, k_at, v_at, page, n0, hi, limit, h, m, den, acc, scale,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One tile of keys: scores [rows, BN], running maximum m, sum den, weighted values acc [rows, DP].

    A key gets the same weight to the last bit in a tile that needs the mask and in one that does not (the multiply-add
    is written out: the compiler fuses it in one of them only), so a token's result does not depend on its chunk.
    """
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
    scores = tl.dot(q, k.T, input_precision="ieee")
    if MASK:
        scores = tl.where(n[None, :] < limit[:, None], scores, HIDDEN)
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.exp2(tl.fma(scores, scale, -top[:, None]))
    fade = tl.exp2(m - top)
    den = den * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return top, den, acc


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
        if FRESH:
            cos = cos_sin
            if HALF > 0:
                cos = cos_sin + tl.load(positions + q0) * (2 * HALF)
            q_factors = head_factors(q_weight, cos, cos + HALF, D, DP, HALF, NORM)
            k_factors = head_factors(k_weight, cos, cos + HALF, D, DP, HALF, NORM)
            new_slot = tl.load(slots + q0)
        if USE_PDL:
            gdc_wait()
        if FRESH:
            first_row = tl.cast(q0, tl.int64)
            one = h + tl.arange(0, 1)
            heads = tl.where(live, head, H * G)
            # All reads before the first sum: what one needs of the others it has to wait for.
            queries = load_heads(q + first_row * q_stride, D, heads, H * G, D, DP, HALF)
            key = load_heads(k + first_row * k_stride, D, one, H, D, DP, HALF)
            value = tl.load(v + first_row * k_stride + one[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
            if (hi == length) & (lo < hi):
                new_key = turned(key, k_factors, eps, D, HALF, NORM).to(k_at.dtype.element_ty)
                at = ((new_slot // 16 * H + one) * 16 + new_slot % 16)[:, None] * D + d[None, :]
                inside = (d[None, :] < D) & (new_slot >= 0)  # a padding row of a captured graph has no slot
                tl.store(k_at + at, new_key, mask=inside)
                tl.store(v_at + at, value.to(v_at.dtype.element_ty), mask=inside)
                tl.debug_barrier()
            qt = turned(queries, q_factors, eps, D, HALF, NORM).to(q.dtype.element_ty)
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
            out_at = row[:, None] * (H * G * D) + head[:, None] * D + d[None, :]
            tl.store(out + out_at, o.to(out.dtype.element_ty), mask=keep)
        else:
            slot = (t * H + h).to(tl.int64) * (QB * G) + r
            tl.store(part + slot[:, None] * D + d[None, :], o, mask=keep)
            tl.store(lse + slot, m + tl.log2(tl.maximum(den, 1e-30)), mask=live)


@triton.jit(do_not_specialize=["seq0", "num_seqs", "token0", "target"])
def combine(
    part, lse, out, query_start, seq_lens, seq0, num_seqs, token0, target,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, QB: tl.constexpr,
    UNIT: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, BH query heads): merge the pieces of a sequence that `attend` split, BS pieces at a time. A batch
    that fills the card has none: its programs end as soon as they know."""
    if USE_PDL:
        gdc_launch_dependents()
    row = token0 + tl.program_id(0)
    blocks_s, units_s, chunk = _units(query_start, seq_lens, seq0, num_seqs, target, SP, QB, UNIT)
    if QB == 1:
        s = row - token0
        local = 0
    else:
        ends = tl.load(query_start + seq0 + 1 + tl.arange(0, SP), mask=tl.arange(0, SP) < num_seqs, other=2147483647)
        s = tl.sum((ends <= row).to(tl.int32))
        local = row - tl.load(query_start + seq0 + s)
    length = tl.load(seq_lens + seq0 + s, mask=s < num_seqs, other=0)
    pieces = _pieces((length + UNIT - 1) // UNIT, chunk)
    if USE_PDL:
        gdc_wait()  # all of them: the next kernel takes the end of this one for the end of `attend`
    if pieces > 1:
        pieces_s = _pieces(units_s, chunk)
        end = _pick(tl.cumsum(blocks_s * pieces_s, 0), s, SP)
        t0 = end - (_pick(blocks_s, s, SP) - local // QB) * pieces
        p = tl.arange(0, BS)
        d = tl.arange(0, DP)
        for head in range(tl.program_id(1) * BH, tl.minimum(tl.program_id(1) * BH + BH, H * G)):
            slot0 = (t0.to(tl.int64) * H + head // G) * (QB * G) + local % QB * G + head % G
            m = FAR
            den = 0.0
            acc = tl.zeros((DP,), tl.float32)
            for p0 in range(0, pieces, BS):
                keep = p0 + p < pieces
                slot = slot0 + (p0 + p).to(tl.int64) * (H * QB * G)
                e = tl.load(lse + slot, mask=keep, other=FAR)
                # A piece past a token's own position has weight 2^-1e29 = 0 for it.
                o = tl.load(part + slot[:, None] * D + d[None, :], mask=keep[:, None] & (d[None, :] < D), other=0.0)
                top = tl.maximum(m, tl.max(e, 0))
                w = tl.exp2(e - top)
                fade = tl.exp2(m - top)
                den = den * fade + tl.sum(w, 0)
                acc = acc * fade + tl.sum(o * w[:, None], 0)
                m = top
            at = row.to(tl.int64) * (H * G * D) + head * D + d
            tl.store(out + at, (acc / den).to(out.dtype.element_ty), mask=d < D)
