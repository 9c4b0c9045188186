"""Prefill attention for Hopper in Gluon: two consumer warpgroups on wgmma, one producer warp on the bulk copy engine.

Plain Triton 3.6 cannot specialise warps on Hopper, so its softmax and its matrix products wait for each other; here one
warpgroup's softmax runs under the other's products (they take turns at issuing them), and the score product of tile i
is issued together with the value product of tile i - 1, which the softmax does not wait for: what it does wait for, the
next keys, comes between them, because ptxas moves a wait for products up to the last branch before it.
A row's sums are kept against the largest score of a tile that came before, until a score exceeds it by 8 (in log2), so
that almost no tile makes the outputs so far smaller; a warp none of whose rows need it skips that. Pages of 16 tokens
go straight from the cache into slices of one shared tile: no gather.
Measured on two H200s (tests/bench/bench_kernels.py, kernels.json is the first; TFLOP/s of causal work in bursts, cuDNN
beside it): 603 and 607 at 8,192 tokens (577, 577), 633 and 632 at 32,768 (600, 649), 612 and 638 for 2,048 on 30,720.
Sources: FlashAttention-3 (Shah et al. 2024), the rare rescaling of FlashAttention-4, our prototype.
Limits: bf16 or fp16, head size 128, capability 9.0. The whole KV pool must hold finite numbers (a fresh pool is zeros):
keys past a sequence's end get weight 0, and 0 * NaN is NaN. Blocks of 128 rows: short chunks go to `split_kv.py`.
The mask is a power of two: times the scale it stays exact, while the residual of a rounded -1e30 under fused
multiply-add is 1e21, and 2^1e21 is inf (seen).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engram_kernels.launch import LOG2E, next_power_of_2
from engram_kernels.metadata import StepMetadata
from engram_kernels.varlen import find_block

BM = 128  # query rows of a program, 64 for each consumer
BN = 128  # keys of a tile
FAR = gl.constexpr(-float(2**100))
NOWHERE = tl.constexpr(1 << 20)  # past any chunk's end
RARE = gl.constexpr(8.0)
"""Powers of two by which a score may pass its row's reference: weights of 2^8 are far from the end of fp16 (2^16), sums
of 2^20 of them from fp32's."""


def _rescale(values: int) -> tuple[str, str]:
    """PTX, and its constraints, that multiplies the outputs a thread holds by its two rows' factors, unless no thread
    of the warp has a factor other than one. As in wgmma's accumulators, values come in pairs of one row, then the
    other; each has its factor as an operand of its own, which costs nothing."""
    factor = 2 * values  # operands: results, the same again as inputs, factors
    lines = [
        "{", ".reg .pred some;", f"setp.neu.f32 some, ${factor}, 0f3F800000;",
        f"setp.neu.or.f32 some, ${factor + 2}, 0f3F800000, some;", "vote.sync.any.pred some, some, 0xffffffff;",
        "@!some bra same;", *(f"mul.f32 ${i}, ${i}, ${factor + i};" for i in range(values)), "same:", "}",
    ]  # fmt: skip
    constraints = ["=f"] * values + [str(i) for i in range(values)] + ["f"] * values
    return "\n".join(lines), ",".join(constraints)


RESCALE, RESCALE_OPERANDS = map(gl.constexpr, _rescale(64))  # 64 x 128 outputs, 128 threads


@triton.jit(do_not_specialize=["seq0", "num_seqs"])
def _list_blocks(query_start, blocks, seq0, num_seqs, SP: tl.constexpr, ROWS: tl.constexpr):
    """blocks[i] = (sequence, first query) of the i-th block of ROWS queries; past the last one a place where no
    sequence has queries."""
    i = tl.program_id(0)
    s, m0 = find_block(query_start, seq0, num_seqs, i, SP, ROWS)
    tl.store(blocks + i * 2, tl.where(s < num_seqs, seq0 + s, seq0))
    tl.store(blocks + i * 2 + 1, tl.where(s < num_seqs, m0, NOWHERE))


@gluon.jit
def _copy_tile(plane, tile, full, pages, row, last_page, h, H: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr):
    """TILE keys (or values) of one head: a box of 16 rows for each page. Pages past the table repeat its last entry."""
    mbarrier.expect(full, TILE * D * 2)
    for j in gl.static_range(TILE // 16):
        page = gl.load(pages + gl.minimum(row // 16 + j, last_page))
        tma.async_copy_global_to_shared(plane, [(page * H + h) * 16, 0], full, tile.slice(j * 16, 16))


@gluon.jit
def _producer(
    descs, smem, bars, pages, last_page, q_row, head, h, tiles,
    H: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: the queries once, then key and value tiles from the diagonal back to the start."""
    q, k, v = descs
    q_tiles, k_tiles, v_tiles = smem
    q_full, k_full, k_free, v_full, v_free, _turn = bars
    mbarrier.expect(q_full, 128 * D * 2)
    for c in gl.static_range(2):
        tma.async_copy_global_to_shared(q, [q_row + c * 64, head * D], q_full, q_tiles.index(c))
    for i in range(tiles):
        stage = i % STAGES
        phase = (i // STAGES & 1) ^ 1
        row = (tiles - 1 - i) * TILE
        mbarrier.wait(k_free.index(stage), phase)
        _copy_tile(k, k_tiles.index(stage), k_full.index(stage), pages, row, last_page, h, H, D, TILE)
        mbarrier.wait(v_free.index(stage), phase)
        _copy_tile(v, v_tiles.index(stage), v_full.index(stage), pages, row, last_page, h, H, D, TILE)


@gluon.jit
def _row_sums(p):
    """[64, N] to [64, 4]: what each of the four threads of a row holds of it, so that none has to ask the others."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _consumer(
    c: gl.constexpr, smem, bars, out, q_row, rows_left, head, start, tiles, scale,
    HEADS: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 query rows, keys from the newest tile to the oldest; only the first two tiles can need the causal mask."""
    q_tiles, k_tiles, v_tiles = smem
    q_full, k_full, k_free, v_full, v_free, turn = bars
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])  # TILE = D: scores and output alike
    p_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    dtype: gl.constexpr = out.dtype.element_ty
    q = q_tiles.index(c)
    r = c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    col = gl.arange(0, TILE, layout=gl.SliceLayout(0, mma))
    reach = r + start - (tiles - 1) * TILE  # a row's position counted from the start of the newest tile
    zero = gl.zeros([64, TILE], gl.float32, mma)
    o = gl.zeros([64, D], gl.float32, mma)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_tiles.index(0).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(0), count=1)
    s = gl.where(reach[:, None] >= col[None, :], s, FAR)  # finite: the next tile repairs a row that sees nothing here
    m = gl.max(s, 1) * scale
    p = gl.exp2(s * scale - m[:, None])
    den = _row_sums(p)
    p16 = gl.convert_layout(p.to(dtype), p_layout)
    mbarrier.wait(k_full.index(1 % STAGES), 1 // STAGES & 1, pred=tiles > 1)
    for i in range(1, tiles):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(v_full.index(before), (i - 1) // STAGES & 1)
        mbarrier.wait(turn.index(c), ((i - 1) & 1) ^ (1 - c))
        s = warpgroup_mma(q, k_tiles.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        o = warpgroup_mma(p16, v_tiles.index(before), o, is_async=True)
        mbarrier.arrive(turn.index(1 - c), count=1)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(stage), count=1)
        if i == 1:  # a chunk that does not start on a tile boundary has two tiles to mask
            s = gl.where((reach + TILE)[:, None] >= col[None, :], s, FAR)
        top = gl.maximum(m, gl.max(s, 1) * scale)
        top = gl.where(top - m > RARE, top, m)
        fade = gl.exp2(m - top)
        p = gl.exp2(s * scale - top[:, None])
        part = _row_sums(p)
        den = den * gl.convert_layout(fade, gl.SliceLayout(1, part.type.layout), assert_trivial=True)[:, None] + part
        m = top
        p16 = gl.convert_layout(p.to(dtype), p_layout)
        mbarrier.wait(k_full.index((i + 1) % STAGES), (i + 1) // STAGES & 1, pred=i + 1 < tiles)  # see above: here
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(before), count=1)
        fades = fade[:, None].broadcast_to([64, D])
        o = gl.inline_asm_elementwise(RESCALE, RESCALE_OPERANDS, [o, fades], gl.float32, True, 64)
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), (tiles - 1) // STAGES & 1)
    o = warpgroup_mma(p16, v_tiles.index(last), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    den = gl.convert_layout(gl.sum(den, 1), gl.SliceLayout(1, mma))
    at = (q_row + r).to(gl.int64) * (HEADS * D) + head * D
    d = gl.arange(0, D, layout=gl.SliceLayout(0, mma))
    gl.store(out + at[:, None] + d[None, :], (o / den[:, None]).to(dtype), mask=(r < rows_left)[:, None])


@gluon.jit(do_not_specialize=["table_stride", "last_page", "count"])
def _attention(
    q, k, v, out, block_tables, blocks, query_start, seq_lens, table_stride, last_page, count, scale,
    HEADS: gl.constexpr, H: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """One program: one head, 128 query rows. BAND heads at a time (their keys share the L2), long rows first."""
    gl.static_assert(STAGES >= 2)  # the next keys are asked for before these values are read
    gl.static_assert((D == 128) & (TILE == 128))
    pid = gl.program_id(0)
    head = pid // (count * BAND) * BAND + pid % BAND
    block = count - 1 - pid // BAND % count
    seq = gl.load(blocks + block * 2)
    m0 = gl.load(blocks + block * 2 + 1)
    q0 = gl.load(query_start + seq)
    new = gl.load(query_start + seq + 1) - q0
    start = gl.load(seq_lens + seq) - new + m0
    tiles = (gl.minimum(start + 128, start + new - m0) + TILE - 1) // TILE
    tiles = gl.where(m0 < new, tiles, 1)  # a block of nobody: the least that leaves every barrier as it should be
    pages = block_tables + seq.to(gl.int64) * table_stride
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 64, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, TILE, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, TILE, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for c in gl.static_range(2):
        mbarrier.init(turn.index(c), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    smem = (q_tiles, k_tiles, v_tiles)
    bars = (q_full, k_full, k_free, v_full, v_free, turn)
    kv_head = head // (HEADS // H)
    gl.warp_specialize([
        (_consumer, (0, smem, bars, out, q0 + m0, new - m0, head, start, tiles, scale, HEADS, D, TILE, STAGES)),
        (_consumer, (1, smem, bars, out, q0 + m0, new - m0, head, start, tiles, scale, HEADS, D, TILE, STAGES)),
        (_producer, ((q, k, v), smem, bars, pages, last_page, q0 + m0, head, kv_head, tiles, H, D, TILE, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


def supports(q: Tensor, kv: Tensor) -> bool:
    """Whether this kernel can serve these tensors (capability is the caller's question)."""
    return (
        q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] == 128 and q.is_contiguous() and kv.is_contiguous()
    )


def prefill_hopper(q: Tensor, kv: Tensor, out: Tensor, meta: StepMetadata, scale: float, stages: int = 2) -> None:
    """Attention of the step's chunks, written into out [T, heads, 128]; q [T, heads, 128] is the whole step's. stages:
    tiles in flight, 2 or 3."""
    heads, dim = q.shape[1:]
    kv_heads = kv.shape[2]
    query_start, block_tables = meta.query_start, meta.block_tables
    chunks = meta.query_lens_host[meta.num_decodes :]
    count = meta.chunk_blocks(BM)
    blocks = torch.empty(count, 2, dtype=torch.int32, device=q.device)
    _list_blocks[(count,)](
        query_start, blocks, meta.num_decodes, len(chunks), next_power_of_2(len(chunks)), BM, num_warps=1
    )
    element = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([BN, dim], element)
    q_desc = TensorDescriptor.from_tensor(q.view(-1, heads * dim), [64, dim], layout)
    k_desc = TensorDescriptor.from_tensor(kv[0].view(-1, dim), [16, dim], layout)
    v_desc = TensorDescriptor.from_tensor(kv[1].view(-1, dim), [16, dim], layout)
    long = max(chunks) >= 16384 and heads % 8 == 0
    _attention[(count * heads,)](
        q_desc, k_desc, v_desc, out, block_tables, blocks, query_start, meta.seq_lens, block_tables.stride(0),
        block_tables.shape[1] - 1, count, scale * LOG2E, heads, kv_heads, dim, BN, stages, 8 if long else heads,
        num_warps=4, maxnreg=168,
    )  # fmt: skip
