"""Gate and up projections with the activation in the product's epilogue.

Alone the activation is a launch of a microsecond, and gate and up are written and read once more. One or two rows
take a GEMV whose program holds the gate rows and the up rows of the same outputs, up to 64 rows on Hopper a weight
stream with two accumulators, more rows (and fewer, where it wins) the tiles of `linear/cooperative.py`, `wide.py` or
`warpgroups.py` that the tuning table lists; everything else is the product followed by the activation. Both halves
stay in fp32 until the result is rounded, so the result is closer to fp32 than that of the separate ops.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TileDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from engram_kernels.gated_linear import warpgroups
from engram_kernels.gated_linear.wide import gated_gemm
from engram_kernels.launch import capability, dependent_launch, multiprocessors
from engram_kernels.linear.kernel import (
    MAX_ROWS,
    TABLE_ROWS,
    Cooperative,
    Gemv,
    Skinny,
    Stream,
    gemv_rule,
    linear,
    parse_for,
    row_bucket,
    run_gated,
    tile_layout,
)
from engram_kernels.linear.stream import supports
from engram_kernels.silu_and_mul.kernel import silu_and_mul
from engram_kernels.tuning import parameters, tuned_or_none


@functools.cache
def plan(rows: int, outputs: int, k: int, hopper: bool) -> Gemv | Stream | Cooperative | None:
    """How to compute [rows, k] x [2 * outputs, k]^T gated; None: `wide_plan` says, or the product, then the
    activation."""
    bucket = row_bucket(rows)
    if bucket > TABLE_ROWS:
        return None
    entry = tuned_or_none("gated_linear", f"rows={bucket},n={outputs},k={k}")
    if entry is not None:
        choice = parse_for("gated_linear", entry, bucket, outputs, k)
        if isinstance(choice, Skinny):
            raise ValueError("kind of a gated_linear tuning entry must not be skinny: it has no gated form")
        return choice
    if bucket > MAX_ROWS:
        return None
    if rows <= 2:
        return gemv_rule(k)
    if hopper and k % 128 == 0:
        split = 2 if k % 256 == 0 and k >= 1024 else 1
        return Stream(max(8, bucket), 128, split, 4)
    return None


WIDEST = 8192
"""More rows than this are tiled as this many are."""
MOST_GROUPED = 1024
"""Tiles of rows before the next column: more are never worth it, and products of it stay in 32 bits."""


@dataclass(frozen=True, slots=True)
class Tile:
    """BM rows and BN outputs a program (BN must divide the outputs) in steps of BK (which must divide K); programs take
    `group` tiles of rows before the next column."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int
    group: int

    def misfit(self, outputs: int, k: int) -> str | None:
        """What keeps it from a layer, or None."""
        for name in ("bm", "bn", "bk", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                return f"{name} = {value} must be a power of two"
        if not 1 <= self.group <= MOST_GROUPED or self.stages < 1:
            return f"stages must be positive, and group from 1 to {MOST_GROUPED}"
        return None if outputs % self.bn == 0 and k % self.bk == 0 else "bn must divide the outputs, and bk k"

    def area(self, rows: int, outputs: int, programs: int) -> int:
        """Of the tiles that a program computes at most, one after the other."""
        return -(-(-(-rows // self.bm) * (outputs // self.bn)) // programs) * self.bm * self.bn


@dataclass(frozen=True, slots=True)
class Warpgroups:
    """The tiles of `warpgroups.py` (Hopper only); programs take `group` tiles of rows before the next column."""

    group: int

    def misfit(self, outputs: int, k: int) -> str | None:
        """What keeps it from a layer, or None."""
        if outputs % warpgroups.OUTPUTS or k % warpgroups.BK or k < warpgroups.BK * warpgroups.STAGES.value:
            return f"{warpgroups.OUTPUTS} must divide the outputs, and {warpgroups.BK} k, three times or more"
        return None if 1 <= self.group <= MOST_GROUPED else f"group = {self.group} must be from 1 to {MOST_GROUPED}"

    def area(self, rows: int, outputs: int, programs: int) -> int:
        """Of the tiles that a program computes at most, one after the other."""
        tiles = -(-rows // warpgroups.ROWS) * (outputs // warpgroups.OUTPUTS)
        return -(-tiles // programs) * warpgroups.ROWS * warpgroups.OUTPUTS


Wide = Tile | Warpgroups
SMALLER = Tile(128, 128, 64, 3, 8, 16)
"""For rows that would leave most of the last wave of larger tiles empty."""
GAIN = 1.05
"""Of `Warpgroups` for the same area, at most."""
WIDE_KINDS: dict[str, type[Wide]] = {"tile": Tile, "warpgroups": Warpgroups}


def parse_wide(entry: Mapping[str, Any], rows: int, outputs: int, k: int) -> Wide:
    """The tile that an entry names. ValueError for one that cannot compute [rows, k] x [2 * outputs, k]^T gated."""
    what = f"the gated_linear.wide tuning entry for rows={rows},n={outputs},k={k}"
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in WIDE_KINDS:
        raise ValueError(f"{what}: kind must be {' or '.join(WIDE_KINDS)}, got {kind!r}")
    choice = parameters(WIDE_KINDS[kind], entry, what)
    if wrong := choice.misfit(outputs, k):
        raise ValueError(f"{what} does not fit: {wrong}")
    return choice


@functools.cache
def wide_plan(rows: int, outputs: int, k: int, programs: int) -> Wide | None:
    """The tile for rows that `plan` has nothing for; None: the product, then the activation. A table lists powers of
    two; between them the last wave of large tiles may be almost empty, and smaller ones are done sooner."""
    bucket = min(1 << (rows - 1).bit_length(), WIDEST)
    entry = tuned_or_none("gated_linear.wide", f"rows={bucket},n={outputs},k={k}")
    if entry is None:
        return None
    choice = parse_wide(entry, bucket, outputs, k)
    large = isinstance(choice, Warpgroups) and SMALLER.misfit(outputs, k) is None
    if large and choice.area(rows, outputs, programs) > GAIN * SMALLER.area(rows, outputs, programs):
        return SMALLER
    return choice


def _run_warpgroups(choice: Warpgroups, x: Tensor, weight: Tensor, y: Tensor) -> None:
    if capability(x)[0] != 9:
        raise ValueError("a gated_linear.wide tuning entry of kind warpgroups needs compute capability 9.0")
    rows, k = x.shape
    outputs = y.shape[1]
    box = [16, 2, 8, warpgroups.BK]  # eight gate rows, eight up rows, and so on
    shape, strides = [outputs // 8, 2, 8, k], [8 * k, outputs * k, k, 1]
    w_tiles = TileDescriptor(weight, shape, strides, box, tile_layout(tuple(box), weight.dtype))
    x_tiles = TileDescriptor.from_tensor(x, [64, warpgroups.BK], tile_layout((64, warpgroups.BK), x.dtype))
    y_tiles = TileDescriptor.from_tensor(y, [64, warpgroups.OUTPUTS], tile_layout((64, warpgroups.OUTPUTS), y.dtype))
    tiles_m, tiles_n = -(-rows // warpgroups.ROWS), outputs // warpgroups.OUTPUTS
    programs = min(multiprocessors(x), tiles_m * tiles_n)
    warpgroups.gated_tiles[(programs,)](
        x_tiles, w_tiles, y_tiles, tiles_m, tiles_n, k // warpgroups.BK, choice.group, num_warps=4
    )


def run_wide(choice: Wide, x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Write silu(gate) * up of x [rows, K] @ weight [2F, K]^T (gate rows first) into y [rows, F]; all dense rows."""
    if isinstance(choice, Warpgroups):
        _run_warpgroups(choice, x, weight, y)
        return
    rows, k = x.shape
    outputs = y.shape[1]
    x_tiles = TensorDescriptor.from_tensor(x, [choice.bm, choice.bk])
    w_tiles = TensorDescriptor.from_tensor(weight, [choice.bn, choice.bk])
    y_tiles = TensorDescriptor.from_tensor(y, [choice.bm, choice.bn])
    programs = min(multiprocessors(x), -(-rows // choice.bm) * (outputs // choice.bn))
    pdl = dependent_launch(x)
    gated_gemm[(programs,)](
        x_tiles, w_tiles, y_tiles, rows, outputs, k, choice.bm, choice.bn, choice.bk, choice.stages, choice.group,
        programs, pdl, num_warps=choice.warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def without_plan(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`gated_linear` where `plan` has nothing: the tiles of `wide.py`, or the product and then the activation."""
    rows = x.numel() // x.shape[-1]
    outputs, k = weight.shape[0] // 2, weight.shape[1]
    if rows > MAX_ROWS and x.dtype != torch.float32 and weight.is_contiguous() and bias is None:
        wide = wide_plan(rows, outputs, k, multiprocessors(x))
        flat = x.reshape(rows, -1)
        if wide is not None and supports(flat, weight):
            y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
            run_wide(wide, flat, weight, y)
            return y.view(*x.shape[:-1], outputs)
    return silu_and_mul(linear(x, weight, bias))


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the reference: x [..., K], weight [2F, K] contiguous."""
    rows = x.numel() // x.shape[-1]
    outputs, k = weight.shape[0] // 2, weight.shape[1]
    if not 0 < rows <= TABLE_ROWS or x.dtype == torch.float32 or not weight.is_contiguous():
        return without_plan(x, weight, bias)
    choice = plan(rows, outputs, k, capability(x)[0] == 9)
    if choice is None:
        return without_plan(x, weight, bias)
    flat = x.reshape(rows, -1)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    if not isinstance(choice, Gemv) and not supports(flat, weight):
        return without_plan(x, weight, bias)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    run_gated(choice, flat, weight, bias, y)
    return y.view(*x.shape[:-1], outputs)
