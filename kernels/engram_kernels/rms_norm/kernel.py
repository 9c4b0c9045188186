"""RMS norm, with or without the residual addition before it: one pass over a row held in registers.

A row is read once and written once, so the limit is memory at large T and launch latency at small T. Rows shorter than
1,024 (norms of single heads) share a program. The weight is loaded before the wait on the previous kernel.
Measured on an H200, with the addition: 8,192 x 4,096 in 67 us (94 % of the copy rate), one row in 1.8 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engram_kernels.launch import dependent_launch, next_power_of_2


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, residual, weight, y, total, rows, inner, x_outer, x_inner, r_stride, eps, scale,
    M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of M. Row r of x starts at (r // inner) * x_outer + (r % inner) * x_inner; y and total are dense."""
    if USE_PDL:
        gdc_launch_dependents()
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, BLOCK)
    w = tl.load(weight + m, mask=m < M, other=0.0).to(tl.float32)
    keep = (r[:, None] < rows) & (m[None, :] < M)
    r64 = r.to(tl.int64)
    if USE_PDL:
        gdc_wait()
    at = ((r64 // inner) * x_outer + (r64 % inner) * x_inner)[:, None] + m[None, :]
    value = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        value = value * scale + tl.load(residual + r64[:, None] * r_stride + m[None, :], mask=keep, other=0.0).to(
            tl.float32
        )
        # Rounded before the norm, as without fusion.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + r64[:, None] * M + m[None, :], rounded, mask=keep)
        value = rounded.to(tl.float32)
    norm = tl.rsqrt(tl.sum(value * value, axis=1) / M + eps)
    out = value * norm[:, None] * w[None, :]
    tl.store(y + r64[:, None] * M + m[None, :], out.to(y.dtype.element_ty), mask=keep)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension: x [..., M] (up to two strided leading dimensions), weight [M]; as the reference."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, y, None, eps, 1.0)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum x * scale + residual), both [T, M] and new; as the reference."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, y, total, eps, scale)
    return y, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor, total: Tensor | None, eps: float, scale: float
) -> None:
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    if not rows:
        return
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, width)
    if x.dim() == 1:
        x = x[None]
    inner = x.shape[1] if x.dim() == 3 else 1
    if residual is not None and residual.stride(-1) != 1:
        residual = residual.contiguous()
    block = max(16, next_power_of_2(width))
    together = max(1, 1024 // block)
    pdl = dependent_launch(x)
    _norm[(-(-rows // together),)](
        x, x if residual is None else residual, weight, y, y if total is None else total, rows, inner, x.stride(0),
        x.stride(1) if x.dim() == 3 else 0, 0 if residual is None else residual.stride(0), eps, scale,
        width, block, together, residual is not None, pdl,
        num_warps=min(8, max(1, block * together // 512)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
