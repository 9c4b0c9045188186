"""Chunked Mamba2 scan: a program carries the state of a few channels of one head through all chunks of a sequence.

Inside a chunk of BT tokens the recurrence is a masked matrix product (state-space duality, Dao and Gu 2024, section 6);
between chunks the state stays in registers, so it is read once, written once, and no intermediate state touches memory.
The multi-kernel form (mamba_ssm, vLLM) has more parallelism inside one long sequence; this one has one launch, works on
any mix of lengths, and its tile product C B^T is recomputed per head, which the tensor cores do not notice.
The state is kept transposed [N, BP], so that no accumulator is transposed on its way into another product (wrong
numbers on Triton 3.4 to 3.7 / Hopper). Products with the state use tf32, the others the model's dtype; sums are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram_kernels.launch import next_power_of_2
from engram_kernels.metadata import StepMetadata
from engram_kernels.state_update.kernel import dense_rows, softplus_clamped
from engram_kernels.tuning import tuned


@triton.jit
def _scan(
    x, dt, A, B, C, skip, dt_bias, state, y, query_start, slots, has_state,
    x_stride, dt_stride, b_stride, c_stride, state_stride, low, high,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, PER_GROUP: tl.constexpr, BP: tl.constexpr,
    BT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (channel block, head, sequence)."""
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    h = tl.program_id(1)
    s = tl.program_id(2)
    n = tl.arange(0, NP)
    i = tl.arange(0, BT)
    start = tl.load(query_start + s)
    length = tl.load(query_start + s + 1) - start
    keep_state = (n[:, None] < N) & (p[None, :] < P)
    at_state = state + tl.load(slots + s) * state_stride + (h * P + p)[None, :] * N + n[:, None]
    carried = tl.load(at_state, mask=keep_state & (tl.load(has_state + s) != 0), other=0.0).to(tl.float32)
    a = tl.load(A + h).to(tl.float32)
    bias = tl.load(dt_bias + h).to(tl.float32)
    d = tl.load(skip + h).to(tl.float32)
    group = h // PER_GROUP * N + n
    dtype = x.dtype.element_ty
    for t0 in range(0, length, BT):
        live = t0 + i < length
        row = (start + t0 + i).to(tl.int64)
        keep = live[:, None] & (p[None, :] < P)
        xt = tl.load(x + row[:, None] * x_stride + (h * P + p)[None, :], mask=keep, other=0.0)
        mask = live[:, None] & (n[None, :] < N)
        c = tl.load(C + row[:, None] * c_stride + group[None, :], mask=mask, other=0.0)
        mask_t = live[None, :] & (n[:, None] < N)
        b_t = tl.load(B + row[None, :] * b_stride + group[:, None], mask=mask_t, other=0.0)
        step = tl.load(dt + row * dt_stride + h, mask=live, other=0.0).to(tl.float32) + bias
        step = tl.where(live, softplus_clamped(step, low, high), 0.0)  # a token past the end neither adds nor forgets
        total = tl.cumsum(step * a, 0)
        end = tl.sum(step * a, 0)
        scores = tl.dot(c, b_t, input_precision=PRECISION)
        gap = total[:, None] - total[None, :]
        decay = tl.exp(tl.where(i[:, None] >= i[None, :], gap, float("-inf")))
        mixed = scores * decay * step[None, :]
        out = tl.dot(mixed.to(dtype), xt, input_precision=PRECISION)
        out += tl.dot(c.to(tl.float32), carried, input_precision=PRECISION) * tl.exp(total)[:, None]
        out += d * xt.to(tl.float32)
        at = (row * H + h)[:, None] * P + p[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), mask=keep)
        weighted = xt.to(tl.float32) * (step * tl.exp(end - total))[:, None]
        carried = tl.dot(b_t.to(tl.float32), weighted, carried * tl.exp(end), input_precision=PRECISION)
    tl.store(at_state, carried.to(state.dtype.element_ty), mask=keep_state)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    meta: StepMetadata,
    chunk_size: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """As the reference; the first dimension of x, dt, B, C may be strided.

    chunk_size is the model's; results do not depend on it beyond rounding, and tiles of the tuning table are used here.
    """
    tokens, heads, channels = x.shape
    size = B.shape[2]
    y = torch.empty(tokens, heads, channels, dtype=x.dtype, device=x.device)
    if not meta.num_sequences:
        return y
    x, dt, B, C = (dense_rows(t) for t in (x, dt, B, C))
    fp32 = x.dtype == torch.float32
    config = tuned("ssd_scan", {"dtype": str(x.dtype).removeprefix("torch.")})
    block = min(config["channels"], max(16, next_power_of_2(channels)))
    _scan[(-(-channels // block), heads, meta.num_sequences)](
        x, dt, A, B, C, D, dt_bias, ssm_state, y, meta.query_start, meta.state_slots, meta.has_state,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), ssm_state.stride(0), *dt_limit,
        heads, channels, size, max(16, next_power_of_2(size)), heads // B.shape[1], block,
        config["tokens"], "ieee" if fp32 else "tf32", num_warps=config["warps"],
    )  # fmt: skip
    return y
