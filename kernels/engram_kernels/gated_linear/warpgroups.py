"""Gate and up projections of many rows on Hopper: persistent tiles of 192 rows by 128 outputs, three warpgroups.

A tile of weights holds eight gate rows and eight up rows in turn (a box of four dimensions), 256 in all, on the N side
of wgmma; each warpgroup multiplies 64 rows by all of them, so that a thread holds both halves of its outputs. Tiles of
192 x 256 ask the L2 for two ninths less than 128 x 256 and leave room for three steps of K and the outputs. As in
`linear/cooperative.py` the first warpgroup also asks the bulk copy engine for everybody's tiles: ptxas 12.8 compiles no
product of 256 columns for 512 threads. It asks for the next tile's first steps before this tile's activation, and
outputs leave by the bulk copy engine while the next tile is multiplied. Programs take `group` tiles of rows before the
next weights, so that both stay in the L2.
Sources: CUTLASS's persistent cooperative kernels; the tiles of `linear/cooperative.py`.
Measured on an H200 that draws all of its 700 W (tests/bench/tune_wide.py, us, beside the best tile of `wide.py` and
cuBLAS with the activation in the same run): 12,288 outputs of 4,096 at 2,048 / 4,096 / 8,192 rows 607 / 1,218 / 2,455
(638 / - / 2,526; 653 / 1,331 / 2,608), 3,072 of 1,024 at 2,048 / 8,192 rows 40 / 160 (45 / 176; 51 / 200). Where tiles
are few, the last wave's decide: smaller ones win as soon as they are done in less (`wide_plan`).
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

ROWS, OUTPUTS, BK = 192, 128, 64
"""Of a tile, and its steps of K."""
STAGES = gl.constexpr(3)
GROUPS = gl.constexpr(3)


@gluon.jit
def _place(tile, tiles_m, tiles_n, group):
    """(tile of rows, tile of outputs); past the last one some other place, where nobody goes."""
    per_group = group * tiles_n
    first = tile // per_group * group
    size = gl.maximum(gl.minimum(tiles_m - first, group), 1)
    return first + tile % per_group % size, tile % per_group // size


@gluon.jit
def _ask(x, w, smem, full, stage, m, n, k, pred):
    """Ask for the rows and the weights of one step of K."""
    x_tiles, w_tiles, _y_tiles = smem
    mbarrier.expect(full.index(stage), (GROUPS * 64 + 256) * 64 * 2, pred=pred)
    tma.async_copy_global_to_shared(w, [n * 16, 0, 0, k], full.index(stage), w_tiles.index(stage), pred=pred)
    for c in gl.static_range(GROUPS):
        tile = x_tiles.index(stage * GROUPS + c)
        tma.async_copy_global_to_shared(x, [(m * GROUPS + c) * 64, k], full.index(stage), tile, pred=pred)


@gluon.jit
def _activate(gate, up):
    """silu(gate) * up; 1 + e^-gate is at least one, so its reciprocal is exact enough, and 0 below a gate of -87, where
    silu is 1e-36."""
    grown = 1.0 + gl.exp2(gate * -1.4426950408889634)
    return gate * gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], gl.float32, True, 1) * up


@gluon.jit
def _multiply(c: gl.constexpr, operands, smem, bars, tiles_m, tiles_n, steps, group):
    """64 rows of each of this program's tiles by one warpgroup; i counts steps of K over all tiles."""
    x, w, y = operands
    x_tiles, w_tiles, y_tiles = smem
    full, free = bars
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    acc = gl.zeros([64, 256], gl.float32, mma)
    m, n = _place(gl.program_id(0), tiles_m, tiles_n, group)
    if c == 0:
        for s in gl.static_range(STAGES):
            _ask(x, w, smem, full, s, m, n, s * 64, True)
    tiles = tiles_m * tiles_n
    programs = gl.num_programs(0)
    i = 0
    for tile in range(gl.program_id(0), tiles, programs):
        next_m, next_n = _place(tile + programs, tiles_m, tiles_n, group)
        another = tile + programs < tiles
        for k in range(steps):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), i // STAGES & 1)
            weights = w_tiles.index(stage)._reinterpret(w_tiles.dtype, [256, 64], flat).permute([1, 0])
            acc = warpgroup_mma(x_tiles.index(stage * GROUPS + c), weights, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            before = (i + STAGES - 1) % STAGES  # the stage of step k - 1, which nobody here reads any more
            if c == 0:
                ahead = k - 1 + STAGES
                here = ahead < steps
                wanted = (k > 0) & (here | another)
                mbarrier.wait(free.index(before), (i - 1) // STAGES & 1, pred=wanted)
                _ask(
                    x, w, smem, full, before, gl.where(here, m, next_m), gl.where(here, n, next_n),
                    gl.where(here, ahead, ahead - steps) * 64, wanted,
                )  # fmt: skip
            else:
                mbarrier.arrive(free.index(before), count=1, pred=k > 0)
            i += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        last = (i + STAGES - 1) % STAGES
        if c == 0:
            mbarrier.wait(free.index(last), (i - 1) // STAGES & 1, pred=another)
            _ask(x, w, smem, full, last, next_m, next_n, (STAGES - 1) * 64, another)
        else:
            mbarrier.arrive(free.index(last), count=1)
        gate, up = gl.split(acc.reshape([64, 16, 2, 8]).permute([0, 1, 3, 2]))
        result = _activate(gate, up).reshape([64, 128]).to(y.dtype)
        tma.store_wait(0)  # the tile before has left
        y_tiles.index(c).store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [(m * GROUPS + c) * 64, n * 128], y_tiles.index(c))
        m = next_m
        n = next_n
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps", "group"])
def gated_tiles(x, w, y, tiles_m, tiles_n, steps, group):
    """x [M, K] in boxes of 64 x 64, w [F / 8, 2, 8, K] (gate rows, up rows) of 16 x 2 x 8 x 64, y [M, F] of 64 x 128.
    tiles_m tiles of 192 rows (rows past M are read as zeros and not stored), tiles_n of 128 outputs; K is `steps`
    tiles of 64, at least STAGES of them. No more programs than tiles."""
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * GROUPS, 64, 64], x.layout)
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, 16, 2, 8, 64], w.layout)
    y_tiles = gl.allocate_shared_memory(y.dtype, [GROUPS, 64, 128], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=GROUPS - 1)
    operands = (x, w, y)
    smem = (x_tiles, w_tiles, y_tiles)
    bars = (full, free)
    gl.warp_specialize([
        (_multiply, (0, operands, smem, bars, tiles_m, tiles_n, steps, group)),
        (_multiply, (1, operands, smem, bars, tiles_m, tiles_n, steps, group)),
        (_multiply, (2, operands, smem, bars, tiles_m, tiles_n, steps, group)),
    ], [4, 4], [168, 168])  # fmt: skip
