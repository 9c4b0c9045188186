"""Linear layers of up to 512 rows on Hopper: warpgroups that share the tokens' tiles, any multiple of 64 weight rows.

The weights are on the M side of wgmma, so a program's share of them can be any multiple of 64 rows, and with it the
number of programs: the 24,576 gate and up rows of Qwen3-8B are 128 programs of 192, one wave of an H200, where tiles of
powers of two are 192 programs and two waves. The tokens are on the N side, up to 256 of them, and each warpgroup reads
them from the same shared memory. The first warpgroup also asks the bulk copy engine for everybody's tiles (a warp of
its own for that would leave three warpgroups 128 registers a thread, fewer than 256 tokens need); as in `stream.py` the
first weights are on their way before x exists. GATED computes silu(gate) * up from weights that hold the gate rows,
then the up rows: eight of each in turn lie in a tile (a box of four dimensions), so that a thread holds both halves of
its outputs. The result goes through the tiles' shared memory to the bulk copy engine. Partial sums of a split are added
by the last warpgroup of a tile, in a fixed order: with many tokens that costs more than a split gains.
Sources: CUTLASS's cooperative kernels (consumers that share the tile of the other operand), swap-AB of vLLM.
Measured on an H200 (tests/bench/tune_linear.py; us, beside the weight stream up to 64 rows, cuBLAS and the activation
above), gated, 8B at 8 / 32 / 64 / 128 / 256 rows: 46.8 / 48.2 / 49.3 / 52.0 / 73.6 (49.3 / 51.3 / 53.8 / 58.0 / 79.0).
Several warpgroups ask for all registers of a multiprocessor, so one such program fits on it; of one warpgroup several.
Not gated it wins for small layers only: what cuBLAS shares between two multiprocessors (one copy of a tile for both)
Triton cannot say. Tiles with rows past the end arrive more slowly.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BK = 64
"""Of a tile: 128 bytes, the widest swizzle."""


@gluon.jit
def _ask(
    w, x, w_tiles, x_tiles, full, stage, n0, m0, k, pred, weights: gl.constexpr, tokens: gl.constexpr,
    GATED: gl.constexpr, GROUPS: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Ask for the weights or the tokens (or both) of one step of K; the stage's barrier is told with the weights."""
    if weights:
        mbarrier.expect(full.index(stage), (GROUPS * 64 + T) * 64 * 2, pred=pred)
        for c in gl.static_range(GROUPS):
            tile = w_tiles.index(stage * GROUPS + c)
            if GATED:
                tma.async_copy_global_to_shared(w, [n0 // 8 + c * 4, 0, 0, k], full.index(stage), tile, pred=pred)
            else:
                tma.async_copy_global_to_shared(w, [n0 + c * 64, k], full.index(stage), tile, pred=pred)
    if tokens:
        tma.async_copy_global_to_shared(x, [m0, k], full.index(stage), x_tiles.index(stage), pred=pred)


@gluon.jit
def _finish(
    c: gl.constexpr, acc, y, bias, x_tiles, n0, m0, N, GATED: gl.constexpr, BIAS: gl.constexpr, T: gl.constexpr
):  # fmt: skip
    """Bias, activation, and the result of [64, T] sums into y. Nobody reads tiles any more: it goes where tokens were,
    and from there in one copy."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 16])
    OUT: gl.constexpr = 32 if GATED else 64
    first = n0 + c * OUT
    if BIAS:
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        if GATED:
            n = first + row // 16 * 8 + row % 8
            at = gl.where(row // 8 % 2 == 0, n, N + n)
        else:
            n = first + row
            at = n
        acc += gl.load(bias + at, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if GATED:
        gate, up = gl.split(acc.reshape([4, 2, 8, T]).permute([0, 2, 3, 1]))
        result = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, T])
    else:
        result = acc
    out = x_tiles.index(c)._reinterpret(y.dtype, [T, OUT], y.layout)
    out.permute([1, 0]).store(result.to(y.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [m0, first], out)
    tma.store_wait(0)


@gluon.jit
def _multiply(
    c: gl.constexpr, operands, smem, bars, sums, place,
    GATED: gl.constexpr, BIAS: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, T: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """64 weight rows (GATED: 32 outputs) of T tokens by one warpgroup; the first one asks for everybody's tiles."""
    w, x, y, bias = operands
    w_tiles, x_tiles = smem
    full, free, done = bars
    part, count = sums
    n0, m0, k0, N, steps, tile, split = place
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    if c == 0:
        for i in gl.static_range(STAGES):
            _ask(w, x, w_tiles, x_tiles, full, i, n0, m0, k0 + i * 64, True, True, False, GATED, GROUPS, T)
        gdc_wait()
        for i in gl.static_range(STAGES):
            _ask(w, x, w_tiles, x_tiles, full, i, n0, m0, k0 + i * 64, True, False, True, GATED, GROUPS, T)
    acc = gl.zeros([64, T], gl.float32, mma)
    for i in range(steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        if GATED:
            weights = w_tiles.index(stage * GROUPS + c)._reinterpret(w_tiles.dtype, [64, 64], flat)
        else:
            weights = w_tiles.index(stage * GROUPS + c)
        acc = warpgroup_mma(weights, x_tiles.index(stage).permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        before = (i + STAGES - 1) % STAGES
        if c == 0:
            more = (i > 0) & (i - 1 + STAGES < steps)
            if GROUPS > 1:
                mbarrier.wait(free.index(before), (i - 1) // STAGES & 1, pred=more)
            _ask(
                w, x, w_tiles, x_tiles, full, before, n0, m0, k0 + (i - 1 + STAGES) * 64, more, True, True, GATED,
                GROUPS, T,
            )  # fmt: skip
        else:
            mbarrier.arrive(free.index(before), count=1, pred=i > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(done, count=1)
    if SPLIT > 1:
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        cols = gl.arange(0, T, layout=gl.SliceLayout(0, mma))
        at = rows[:, None] * T + cols[None, :]
        parts = part + (tile * GROUPS + c).to(gl.int64) * (SPLIT * 64 * T)
        gl.store(parts + split * (64 * T) + at, acc)
        gl.thread_barrier()
        arrived = count + tile * GROUPS + c
        if gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            gl.store(arrived, 0)
            total = gl.zeros([64, T], gl.float32, mma)
            for s in gl.static_range(SPLIT):
                total += gl.load(parts + s * (64 * T) + at, cache_modifier=".cg")
            mbarrier.wait(done, 0)
            _finish(c, total, y, bias, x_tiles, n0, m0, N, GATED, BIAS, T)
    else:
        mbarrier.wait(done, 0)
        _finish(c, acc, y, bias, x_tiles, n0, m0, N, GATED, BIAS, T)


@gluon.jit(do_not_specialize=["N", "steps"])
def cooperative(
    w, x, y, bias, part, count, N, steps,
    GATED: gl.constexpr, BIAS: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Program (tile of T tokens, tile of 64 * GROUPS weight rows, split of K); N outputs.

    w [N, K] in boxes of 64 x 64, GATED [N / 8, 2, 8, K] in boxes of 4 x 2 x 8 x 64; x [M, K] of T x 64; y [M, N] of
    T x 64 or, GATED, T x 32. K is SPLIT * steps tiles of 64, steps at least STAGES, STAGES at least GROUPS
    and, of two steps or more, 2.
    part [tiles, GROUPS, SPLIT, 64, T] fp32; count: zeros, left so.
    """
    gdc_launch_dependents()
    T: gl.constexpr = x.block_type.shape[0]
    m0 = gl.program_id(0) * T
    n0 = gl.program_id(1) * (GROUPS * (32 if GATED else 64))
    split = gl.program_id(2)
    k0 = split * (steps * 64)
    tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    if GATED:
        w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES * GROUPS, 4, 2, 8, 64], w.layout)
    else:
        w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES * GROUPS, 64, 64], w.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, T, 64], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS - 1 if GROUPS > 1 else 1)
    mbarrier.init(done, count=GROUPS)
    operands = (w, x, y, bias)
    smem = (w_tiles, x_tiles)
    bars = (full, free, done)
    sums = (part, count)
    place = (n0, m0, k0, N, steps, tile, split)
    gl.static_assert(GROUPS <= 4)
    if GROUPS == 1:
        _multiply(0, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)
    elif GROUPS == 2:
        gl.warp_specialize([
            (_multiply, (0, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)),
            (_multiply, (1, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)),
        ], [4], [248])  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize([
            (_multiply, (0, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)),
            (_multiply, (1, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)),
            (_multiply, (2, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)),
        ], [4, 4], [168, 168])  # fmt: skip
    elif GROUPS == 4:
        gl.warp_specialize([
            (_multiply, (0, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)),
            (_multiply, (1, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)),
            (_multiply, (2, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)),
            (_multiply, (3, operands, smem, bars, sums, place, GATED, BIAS, SPLIT, GROUPS, T, STAGES)),
        ], [4, 4, 4], [128, 128, 128])  # fmt: skip
