"""Linear layers of 2 to 64 rows on Hopper: weights stream through shared memory and are on their way before x exists.

Such a layer is bound by reading its weights, and between two layers the card idles for as long as the first reads of
the second take to arrive. A program asks the bulk copy engine for its first weight tiles at once, then waits for the
kernel that makes x (programmatic dependent launch), then asks for x: the weights of one layer arrive under the tail of
the one before. Plain Triton cannot say this: its pipeliner keeps the loads of both operands of a product together.
The weights are on the M side of wgmma (64 rows), the tokens on the N side (8 to 64). Partial sums of a split are added
by the last program of a tile in a fixed order, as in `skinny.py`. GATED computes silu(gate) * up from weights that hold
the gate rows, then the up rows.
Sources: the GEMV of `gemv.py` (same idea in registers), swap-AB of vLLM and gemlite.
Measured on an H200, 8 rows (us, beside `skinny.py` and cuBLAS in the same run): 8B qkv 13.6 / 15.6 / 15.8, o 9.8 / 10.9
/ 13.2, gate_up 46.9 / 49.9 / 54.2, down 25.3 / 26.9 / 30.6; 0.6B qkv 3.1 / 4.5 / 5.2, o 3.5 / 4.2 / 5.9, down 3.9 / 5.1
/ 7.5; gated, 8B 49.2 (cuBLAS and the activation 57.2), 0.6B 4.4 (7.6). Few splits and a deep pipeline win.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BN = 64
"""Weight rows of a tile: the M side of one warpgroup's product."""


@gluon.jit(do_not_specialize=["M", "steps"])
def stream(
    w, x, bias, y, part, count, M, N, y_stride, steps,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Program (tile of 64 outputs, split of K): w [N or 2N, K], x [M, K], y [M, N]; K is SPLIT * steps tiles, steps at
    least STAGES. part [SPLIT, parts, M, N] fp32 with parts = 2 when GATED; count: zeros, left so."""
    gdc_launch_dependents()
    PARTS: gl.constexpr = 2 if GATED else 1
    BM: gl.constexpr = x.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    n0 = gl.program_id(0) * 64
    k0 = gl.program_id(1) * (steps * BK)
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES * PARTS, 64, BK], w.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), (PARTS * 64 + BM) * BK * 2)
        for j in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(w, [n0 + j * N, k0 + i * BK], full.index(i), w_tiles.index(i * PARTS + j))
    gdc_wait()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [0, k0 + i * BK], full.index(i), x_tiles.index(i))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    acc = gl.zeros([64, BM], gl.float32, mma)
    up = gl.zeros([64, BM], gl.float32, mma)
    for i in range(steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        xt = x_tiles.index(stage).permute([1, 0])
        acc = warpgroup_mma(w_tiles.index(stage * PARTS), xt, acc, is_async=True)
        if GATED:
            up = warpgroup_mma(w_tiles.index(stage * PARTS + 1), xt, up, is_async=True)
            acc, up = warpgroup_mma_wait(0, deps=[acc, up])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        more = i + STAGES < steps
        at = k0 + (i + STAGES) * BK
        mbarrier.expect(full.index(stage), (PARTS * 64 + BM) * BK * 2, pred=more)
        for j in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(
                w, [n0 + j * N, at], full.index(stage), w_tiles.index(stage * PARTS + j), pred=more
            )
        tma.async_copy_global_to_shared(x, [0, at], full.index(stage), x_tiles.index(stage), pred=more)
    n = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, mma))
    keep = (n[:, None] < N) & (m[None, :] < M)
    at = m.to(gl.int64)[None, :] * N + n[:, None]
    last_to_finish = True
    if SPLIT > 1:
        size = gl.cast(M, gl.int64) * N
        mine = part + gl.program_id(1) * PARTS * size
        gl.store(mine + at, acc, mask=keep)
        if GATED:
            gl.store(mine + size + at, up, mask=keep)
        gl.thread_barrier()
        tile = count + gl.program_id(0)
        last_to_finish = gl.atomic_add(tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last_to_finish:
            gl.store(tile, 0)
            acc = gl.zeros([64, BM], gl.float32, mma)
            up = gl.zeros([64, BM], gl.float32, mma)
            for s in gl.static_range(SPLIT):
                acc += gl.load(part + s * PARTS * size + at, mask=keep, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += gl.load(part + (s * PARTS + 1) * size + at, mask=keep, other=0.0, cache_modifier=".cg")
    if last_to_finish:
        if BIAS:
            acc += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
            if GATED:
                up += gl.load(bias + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if GATED:
            acc = acc / (1.0 + gl.exp(-acc)) * up
        out = m.to(gl.int64)[None, :] * y_stride + n[:, None]
        gl.store(y + out, acc.to(y.dtype.element_ty), mask=keep)


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether the bulk copy engine can read these operands (the capability is the caller's question)."""
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return aligned and x.stride(-1) == 1 and x.stride(0) % 8 == 0 and weight.shape[1] % 8 == 0
