"""Gate and up projections with the activation in the product's epilogue.

Alone the activation is a launch of a microsecond, and gate and up are written and read once more. One or two rows
take a GEMV whose program holds the gate rows and the up rows of the same outputs, up to 64 rows on Hopper a weight
stream with two accumulators, more rows (and fewer, where it wins) the tiles of `linear/cooperative.py` or `wide.py`
that the tuning table lists; everything else is the product followed by the activation. Both halves stay in fp32 until
the result is rounded, so the result is closer to fp32 than that of the separate ops.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
)
from engram_kernels.linear.stream import supports
from engram_kernels.silu_and_mul.kernel import silu_and_mul
from engram_kernels.tuning import tuned_or_none


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


@functools.cache
def wide_plan(rows: int, outputs: int, k: int) -> Tile | None:
    """The tile for rows that `plan` has nothing for; None: the product, then the activation."""
    bucket = min(1 << (rows - 1).bit_length(), WIDEST)
    entry = tuned_or_none("gated_linear.wide", f"rows={bucket},n={outputs},k={k}")
    if entry is None:
        return None
    return Tile(*(int(entry[field]) for field in ("bm", "bn", "bk", "stages", "warps", "group")))


def run_wide(choice: Tile, x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Write silu(gate) * up of x [rows, K] @ weight [2F, K]^T (gate rows first) into y [rows, F]; all dense rows."""
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
        wide = wide_plan(rows, outputs, k)
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
