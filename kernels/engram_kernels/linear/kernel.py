"""Linear layers: a GEMV, a weight stream, tiles or cuBLAS, by the tuning table for shape and rows.

Up to 64 rows (decode) reading the weights is everything and our kernels win or tie; up to 512 a table may list
warpgroups that share tiles (`cooperative.py`); all else is cuBLAS's. Shapes that no table lists get the rules of
`plan`. All choices are made from shapes: nothing waits for the device, everything captures into a CUDA graph. A gated
layer (silu(gate) * up of one product) has its own kernels and its own choices, because its activation costs no launch
there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engram_kernels.launch import dependent_launch, multiprocessors
from engram_kernels.linear.cooperative import BK, cooperative
from engram_kernels.linear.gemv import gated_gemv, gemv
from engram_kernels.linear.skinny import skinny
from engram_kernels.linear.stream import BN, stream, supports
from engram_kernels.tuning import parameters, tuned_or_none

MAX_ROWS = 64
"""More rows than this are cuBLAS's where no table lists them."""
TABLE_ROWS = 512
"""More rows than this no table lists: they are always cuBLAS's."""

__all__ = [
    "MAX_ROWS", "TABLE_ROWS", "Choice", "Cooperative", "Gemv", "Skinny", "Stream", "gemv_rule", "linear", "parse",
    "parse_for", "plan", "row_bucket", "run", "run_gated", "tile_layout",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gemv:
    """BN output columns a program, K in tiles of BK (a power of two, at most four of them)."""

    bn: int
    bk: int
    warps: int


@dataclass(frozen=True, slots=True)
class Skinny:
    """A BM x BN tile over 1 / split of K in steps of BK (which must divide K); swap: weights on the M side."""

    bm: int
    bn: int
    bk: int
    split: int
    swap: bool
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class Stream:
    """BM tokens, weight tiles of 64 x BK over 1 / split of K (which BK * split must divide); at most `stages` in
    flight. Hopper only."""

    bm: int
    bk: int
    split: int
    stages: int


@dataclass(frozen=True, slots=True)
class Cooperative:
    """`groups` warpgroups (at most 4) of 64 weight rows and `tokens` tokens (at most 256; 128 with 4 groups) a program,
    1 / split of K (which 64 * split must divide), `stages` steps of 64 in flight (no fewer than groups, no more than
    there are, and two of two or more). Hopper only."""

    groups: int
    tokens: int
    split: int
    stages: int


Choice = Gemv | Skinny | Stream | Cooperative
Plan = Choice | None
"""None: cuBLAS."""
KINDS: dict[str, type[Choice]] = {"gemv": Gemv, "skinny": Skinny, "stream": Stream, "cooperative": Cooperative}


def row_bucket(rows: int) -> int:
    """The number of rows whose table entry serves this many (at least one): a power of two, from 64 on a multiple of
    64, because there time grows with the tiles that have any row at all."""
    return 1 << (rows - 1).bit_length() if rows <= MAX_ROWS else -(-rows // 64) * 64


@functools.cache
def plan(rows: int, n: int, k: int, sms: int) -> Plan:
    """How to compute [rows, k] x [n, k]^T: the tuned choice, or the rules that fit the shapes measured so far."""
    bucket = row_bucket(rows)
    if bucket > TABLE_ROWS:
        return None
    entry = tuned_or_none("linear", f"rows={bucket},n={n},k={k}")
    if entry is not None:
        return parse_for("linear", entry, bucket, n, k)
    if bucket > MAX_ROWS:
        return None
    if rows <= 2:
        return gemv_rule(k)
    bk = 128
    if k % bk or k < 512:
        return None
    bm = max(16, bucket)
    bn = 64 if bucket < 64 else 32
    tiles = -(-n // bn)
    split = 1
    while tiles * split < 3 * sms // 2 and k // bk // (2 * split) >= 4 and split < 8:
        split *= 2
    return Skinny(bm, bn, bk, split, bucket < 64, 4, 4)


def gemv_rule(k: int) -> Gemv | None:
    """Whole rows in registers: 32 to 48 registers of packed weights a thread."""
    for tiles in (1, 2, 3, 4):
        if k % tiles == 0 and (k // tiles) & (k // tiles - 1) == 0 and 256 <= k // tiles <= 4096:
            return Gemv(2, k // tiles, 8 if k > 8192 else 4)
    tiles = -(-k // 4096)
    if tiles > 4:
        return None
    bk = 4096 if tiles > 1 else max(256, 1 << (k - 1).bit_length())
    return Gemv(2, bk, 8 if k > 8192 else 4)


def parse(entry: dict[str, int | str]) -> Plan:
    """The choice that a tuning entry names."""
    kind = entry.get("kind")
    if kind == "cublas":
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind of a linear tuning entry must be {', '.join(KINDS)} or cublas, got {kind!r}")
    return parameters(KINDS[kind], entry, f"a linear tuning entry of kind {kind}")


def parse_for(op: str, entry: dict[str, int | str], rows: int, n: int, k: int) -> Plan:
    """The choice that an entry names for so many rows. ValueError for one that cannot compute [rows, k] x [n, k]^T:
    the kernels do not ask, they would read what is not there."""
    choice = parse(entry)
    wrong = _misfit(choice, rows, n, k)
    if wrong:
        raise ValueError(f"the {op} tuning entry for rows={rows},n={n},k={k} does not fit: {wrong}")
    return choice


def _misfit(choice: Plan, rows: int, n: int, k: int) -> str | None:
    """What is wrong with a choice of split tiles, or None."""
    if isinstance(choice, Skinny):
        return None if k % choice.bk == 0 else f"bk = {choice.bk} must divide k"
    if isinstance(choice, Stream):
        if choice.bm < rows:
            return f"bm = {choice.bm} must be at least the rows"
        return None if k % (choice.bk * choice.split) == 0 else "bk * split must divide k"
    if not isinstance(choice, Cooperative):
        return None
    if not 1 <= choice.groups <= 4 or choice.groups * choice.tokens > 768:
        return f"groups = {choice.groups} must be 1 to 4, and groups * tokens at most 768"
    if choice.tokens not in (8, 16, 32, 64, 128, 256):
        return f"tokens = {choice.tokens} must be a power of two from 8 to 256"
    if choice.split < 1 or k % (BK * choice.split) or n % 8:
        return f"{BK} * split must divide k, and 8 n"
    steps = k // (BK * choice.split)
    if not max(choice.groups, min(2, steps)) <= choice.stages <= steps:
        return f"stages = {choice.stages} must be at least groups and 2, and at most the steps of K, {steps}"
    tiles = -(-rows // choice.tokens) * -(-n // 32)
    return None if choice.split == 1 or tiles <= COUNTERS else "too many tiles for a split"


COUNTERS = 16384
"""Of arrivals: tiles that one launch can split."""


@functools.cache
def _counters(device: torch.device, stream: int) -> Tensor:
    """Arrival counters of split tiles: zero between launches. One set per stream, because streams run side by side."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _counters_of(x: Tensor) -> Tensor:
    return _counters(x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)


@functools.cache
def tile_layout(shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How such a box of a tensor lies in shared memory for wgmma."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(shape), element)


def _run_stream(choice: Stream, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, gated: bool) -> None:
    rows, k = x.shape
    n = y.shape[1]
    part, count = y, y
    if choice.split > 1:
        part = torch.empty(choice.split, 1 + gated, rows, n, dtype=torch.float32, device=x.device)
        count = _counters_of(x)
    steps = k // (choice.bk * choice.split)
    w_tiles = TensorDescriptor.from_tensor(weight, [BN, choice.bk], tile_layout((BN, choice.bk), weight.dtype))
    x_tiles = TensorDescriptor.from_tensor(x, [choice.bm, choice.bk], tile_layout((choice.bm, choice.bk), x.dtype))
    stream[(-(-n // BN), choice.split)](
        w_tiles, x_tiles, weight if bias is None else bias, y, part, count, rows, n, y.stride(0), steps, choice.split,
        min(choice.stages, steps), gated, bias is not None, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _run_cooperative(
    choice: Cooperative, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, gated: bool
) -> None:
    if y.dtype != x.dtype:
        raise ValueError(f"a cooperative linear kernel writes {x.dtype} as it reads, not {y.dtype}")
    rows, k = x.shape
    n = y.shape[1]
    width = 32 if gated else 64
    grid = (-(-rows // choice.tokens), -(-n // (choice.groups * width)), choice.split)
    part, count = y, y
    if choice.split > 1:
        tiles = grid[0] * grid[1] * choice.groups
        part = torch.empty(tiles, choice.split, 64, choice.tokens, dtype=torch.float32, device=x.device)
        count = _counters_of(x)
    if gated:  # eight gate rows, eight up rows, and so on
        shape, strides = [n // 8, 2, 8, k], [8 * k, n * k, k, 1]
        w_tiles = TensorDescriptor(weight, shape, strides, [4, 2, 8, BK], tile_layout((4, 2, 8, BK), weight.dtype))
    else:
        w_tiles = TensorDescriptor.from_tensor(weight, [64, BK], tile_layout((64, BK), weight.dtype))
    x_tiles = TensorDescriptor.from_tensor(x, [choice.tokens, BK], tile_layout((choice.tokens, BK), x.dtype))
    y_tiles = TensorDescriptor.from_tensor(y, [choice.tokens, width], tile_layout((choice.tokens, width), y.dtype))
    cooperative[grid](
        w_tiles, x_tiles, y_tiles, weight if bias is None else bias, part, count, n, k // (BK * choice.split), gated,
        bias is not None, choice.split, choice.groups, choice.stages, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def run_gated(choice: Gemv | Stream | Cooperative, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Write silu(gate) * up of x [rows, K] @ weight [2F, K]^T + bias (gate rows first) into y [rows, F]."""
    if isinstance(choice, Stream):
        _run_stream(choice, x, weight, bias, y, True)
        return
    if isinstance(choice, Cooperative):
        _run_cooperative(choice, x, weight, bias, y, True)
        return
    rows, k = x.shape
    pdl = dependent_launch(x)
    gated_gemv[(-(-y.shape[1] // choice.bn),)](
        x, weight, weight if bias is None else bias, y, y.shape[1], x.stride(0), y.stride(0), rows, k, choice.bn,
        choice.bk, bias is not None, pdl, num_warps=choice.warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def run(choice: Choice, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Write x [rows, K] @ weight [N, K]^T + bias into y [rows, N] with one of our kernels. y: any float dtype;
    of x's for Cooperative, which also wants its rows aligned to 16 bytes."""
    if isinstance(choice, Stream):
        _run_stream(choice, x, weight, bias, y, False)
        return
    if isinstance(choice, Cooperative):
        _run_cooperative(choice, x, weight, bias, y, False)
        return
    rows, k = x.shape
    n = weight.shape[0]
    pdl = dependent_launch(x)
    kwargs = {"launch_pdl": True} if pdl else {}
    some_bias = weight if bias is None else bias
    if isinstance(choice, Gemv):
        gemv[(-(-n // choice.bn),)](
            x, weight, some_bias, y, n, x.stride(0), y.stride(0), rows, k, choice.bn, choice.bk, bias is not None, pdl,
            num_warps=choice.warps, **kwargs,
        )  # fmt: skip
        return
    part, count = y, y
    if choice.split > 1:
        part = torch.empty(choice.split, rows, n, dtype=torch.float32, device=x.device)
        count = _counters_of(x)
    skinny[(-(-n // choice.bn), choice.split, -(-rows // choice.bm))](
        x, weight, some_bias, y, part, count, rows, n, k, x.stride(0), y.stride(0), choice.bm, choice.bn, choice.bk,
        choice.split, choice.swap, choice.stages, bias is not None, pdl, num_warps=choice.warps, **kwargs,
    )  # fmt: skip


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [..., K], weight [N, K] contiguous; as the reference, accumulated in fp32."""
    rows = x.numel() // x.shape[-1]
    if rows > TABLE_ROWS or rows == 0 or x.dtype == torch.float32 or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    choice = plan(rows, weight.shape[0], weight.shape[1], multiprocessors(x))
    if choice is None:
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    if isinstance(choice, Stream | Cooperative) and not supports(flat, weight):
        return F.linear(x, weight, bias)
    y = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
    run(choice, flat, weight, bias, y)
    return y.view(*x.shape[:-1], weight.shape[0])
