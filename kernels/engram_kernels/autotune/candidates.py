"""Launch parameters worth trying for linear layers of few rows: what fits registers, shared memory and the card."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engram_kernels.gated_linear.kernel import plan as gated_plan
from engram_kernels.launch import next_power_of_2
from engram_kernels.linear.cooperative import BK
from engram_kernels.linear.kernel import (
    MAX_ROWS,
    Choice,
    Cooperative,
    Gemv,
    Skinny,
    Stream,
    plan,
    row_bucket,
    run,
    run_gated,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KINDS = ("gemv", "skinny", "stream", "cooperative")
FP32_KINDS = KINDS[:3]
"""Those whose result may be fp32 where x is not: for the projection onto the vocabulary."""


def gemv_candidates(k: int, rows: int) -> list[Gemv]:
    """Packed weights fill 4 to 64 registers of a thread."""
    found = []
    for bn in (1, 2, 4, 8):
        for tiles in (1, 2, 3, 4):
            bk = next_power_of_2(-(-k // tiles))
            if -(-k // bk) != tiles or bk * tiles > 4 * k // 3 + 1:
                continue
            for warps in (1, 2, 4, 8):
                registers = bn * bk * tiles // 2 // (32 * warps)
                if 4 <= registers <= 48 and bn * bk // (32 * warps) <= 64 and not (rows > 2 and bn < 2):
                    found.append(Gemv(bn, bk, warps))
    return found


TILES = {  # bn, bk, swap, stages, warps
    16: [(64, 128, 1, 4, 4), (64, 256, 1, 3, 4), (32, 256, 0, 4, 4), (32, 128, 0, 5, 4), (64, 64, 1, 6, 4),
         (16, 256, 0, 4, 4), (128, 128, 1, 4, 4)],
    32: [(64, 128, 1, 4, 4), (64, 256, 1, 3, 4), (32, 256, 0, 4, 4), (64, 64, 1, 6, 4), (128, 128, 1, 4, 4)],
    64: [(64, 128, 1, 4, 4), (32, 128, 0, 5, 4), (32, 256, 0, 3, 4), (64, 128, 0, 4, 4), (128, 64, 1, 4, 8),
         (64, 64, 1, 6, 4)],
}  # fmt: skip


def skinny_candidates(rows: int, n: int, k: int) -> list[Skinny]:
    """Tiles and splits that give the card enough programs and no more partial sums than it helps."""
    bm = max(16, rows)
    found = []
    for bn, bk, swap, stages, warps in TILES[bm]:
        tiles = -(-n // bn)
        for split in (1, 2, 4, 8):
            programs = tiles * split
            if k % bk or k // bk // split < 2 or (split > 1 and programs > 132 * 5) or programs < min(60, 8 * tiles):
                continue
            found.append(Skinny(bm, bn, bk, split, bool(swap), stages, warps))
    return found


STREAMS = [(128, 4), (128, 6), (128, 10), (64, 8), (64, 16), (256, 3)]  # tile of K, stages


def stream_candidates(rows: int, n: int, k: int, gated: bool) -> list[Stream]:
    """Weight streams whose tiles fit the shared memory."""
    bm = max(8, 1 << (rows - 1).bit_length())
    tiles = -(-n // 64)
    found: dict[Stream, None] = {}
    for bk, stages in STREAMS:
        for split in (1, 2, 3, 4, 6, 8):
            steps = k // (bk * split)
            if (
                k % (bk * split)
                or steps < 2
                or tiles * split < min(48, 4 * tiles)
                or (split > 1 and tiles * split > 800)
            ):
                continue
            deep = min(stages, steps)
            if deep * ((128 if gated else 64) + bm) * bk * 2 <= 224 << 10 and (bm < 32 or tiles * split <= 800):
                found[Stream(bm, bk, split, deep)] = None
    return list(found)


SHARED_BYTES = 231_000
"""Of a multiprocessor of Hopper, less what barriers take."""


def cooperative_candidates(rows: int, n: int, k: int, gated: bool) -> list[Cooperative]:
    """A third of a wave to four waves of programs, each as deep as the shared memory allows (of one warpgroup also so
    that two to four fit on a multiprocessor), or five steps. A split writes its sums and reads them again: only where
    most of the card would idle, and not for 256 tokens, whose sums fill the registers already."""
    found: dict[Cooperative, None] = {}
    bucket = row_bucket(rows)
    for groups in (1, 2, 3, 4):
        for tokens in (max(8, bucket),) if bucket <= MAX_ROWS else (64, 128) if bucket <= 128 else (128, 256):
            if groups == 4 and tokens == 256:  # 512 threads have 128 registers each
                continue
            for split in (1, 2, 4):
                tiles = -(-rows // tokens) * -(-n // (groups * (32 if gated else 64)))
                if n % 8 or k % (BK * split) or not 48 <= tiles * split <= 560:
                    continue
                if split > 1 and (tiles > 100 or tokens == 256):
                    continue
                step = (64 * groups + tokens) * BK * 2
                depths = [SHARED_BYTES // step]
                if groups == 1:
                    depths += [(SHARED_BYTES // programs - 1024) // step for programs in (2, 3, 4)]
                for depth in (*depths, min(5, depths[0])):
                    stages = min(depth, 8, k // (BK * split))
                    if stages >= max(groups, 2):
                        found[Cooperative(groups, tokens, split, stages)] = None
    return list(found)


def candidates(
    rows: int,
    n: int,
    k: int,
    gated: bool,
    kinds: Sequence[str] = KINDS,
    multiprocessors: int = 132,
    hopper: bool = True,
) -> list[Choice]:
    """Everything to try for [rows, k] x [n, k]^T (gated: n outputs of 2n weight rows), today's choice first."""
    found: list[Choice] = []
    current = gated_plan(rows, n, k, hopper) if gated else plan(rows, n, k, multiprocessors)
    if current is not None and (not isinstance(current, Gemv) or rows <= 8):
        found.append(current)
    if "gemv" in kinds and rows <= (2 if gated else 8):
        gemvs = gemv_candidates(k, rows)
        found += [g for g in gemvs if not gated or (g.bn <= 4 and g.bn * g.bk // (32 * g.warps) <= 32)]
    if rows > 2 and hopper and "cooperative" in kinds:
        found += cooperative_candidates(rows, n, k, gated)
    if rows > MAX_ROWS:
        return list(dict.fromkeys(found))
    if rows > 1 and "skinny" in kinds and not gated:
        found += skinny_candidates(rows, n, k)
    if rows > 1 and hopper and "stream" in kinds:  # elsewhere its instructions are not there
        found += stream_candidates(rows, n, k, gated)
    return list(dict.fromkeys(found))


def call(choice: Choice, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, gated: bool) -> None:
    """Run one candidate into y [rows, n]."""
    if gated:
        assert not isinstance(choice, Skinny)
        run_gated(choice, x, weight, None, y)
    else:
        run(choice, x, weight, None, y)
