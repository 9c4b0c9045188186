"""One Mamba2 step of every decode: the state is read once and written once, everything else is small beside it.

A program owns BP channels of one head of one sequence, so a state of any size streams through registers. Source:
selective state update of mamba_ssm. Measured on an H200 (48 x 64 x 128, fp32): 1 / 8 / 64 / 256 sequences in 2.1 / 7.9
/ 52.7 / 202 us (35 / 75 / 90 / 93 % of the copy rate) with 16 channels and one warp a program. A bf16 state is half of
that to move, and is rounded by chance (`rounding.py`); what a model gains: docs/performance.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engram_kernels.launch import dependent_launch, next_power_of_2
from engram_kernels.metadata import StepMetadata
from engram_kernels.state_update import rounding

FIRST, SECOND = tl.constexpr(rounding.FIRST), tl.constexpr(rounding.SECOND)


@triton.jit
def softplus_clamped(value, low, high):
    """log(1 + exp(value)), which is value itself where exp would overflow; clamped to the model's limits."""
    step = tl.where(value <= 20.0, tl.log(1.0 + tl.exp(tl.minimum(value, 20.0))), value)
    return tl.minimum(tl.maximum(step, low), high)


@triton.jit
def _mixed(word):
    word = word * FIRST
    return (word ^ (word >> 15)) * SECOND


@triton.jit
def _rounded(value, length, place):
    """value fp32 to bf16 by the chance that its place in the layer's state has behind `length` tokens, as
    `rounding.stored` does it."""
    key = _mixed(length.to(tl.uint32))
    word = _mixed(key ^ (key >> 16) ^ place.to(tl.uint32))
    raised = (value.to(tl.uint32, bitcast=True) + (word >> 16)) >> 16
    # A NaN's bits may carry into the sign.
    return tl.where(value == value, raised, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _update(
    x, dt, A, B, C, skip, dt_bias, state, y, slots, targets, has_state, seq_lens,
    x_stride, dt_stride, b_stride, c_stride, state_stride, low, high,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, PER_GROUP: tl.constexpr, BP: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (channel block, head, sequence). state [slots, H, P, N] with slot stride state_stride, from slots to
    targets; seq_lens is for bf16 states, None for fp32 ones."""
    if USE_PDL:
        gdc_launch_dependents()
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    h = tl.program_id(1)
    s = tl.program_id(2).to(tl.int64)
    n = tl.arange(0, NP)
    a = tl.load(A + h).to(tl.float32)
    bias = tl.load(dt_bias + h).to(tl.float32)
    d = tl.load(skip + h).to(tl.float32)
    if seq_lens is not None:
        length = tl.load(seq_lens + s)
    keep = (p[:, None] < P) & (n[None, :] < N)
    inner = (h * P + p)[:, None] * N + n[None, :]
    # The state is that of an earlier step: its read, which is most of the work, need not wait for this one's kernels.
    old_at = state + tl.load(slots + s) * state_stride + inner
    new_at = state + tl.load(targets + s) * state_stride + inner
    old = tl.load(old_at, mask=keep & (tl.load(has_state + s) != 0), other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    step = tl.load(dt + s * dt_stride + h).to(tl.float32) + bias
    step = softplus_clamped(step, low, high)
    value = tl.load(x + s * x_stride + h * P + p, mask=p < P, other=0.0).to(tl.float32)
    group = h // PER_GROUP * N + n
    b = tl.load(B + s * b_stride + group, mask=n < N, other=0.0).to(tl.float32)
    c = tl.load(C + s * c_stride + group, mask=n < N, other=0.0).to(tl.float32)
    new = old * tl.exp(step * a) + (value * step)[:, None] * b[None, :]
    if seq_lens is not None:
        tl.store(new_at, _rounded(new, length, inner), mask=keep)
    else:
        tl.store(new_at, new, mask=keep)
    out = tl.sum(new * c[None, :], axis=1) + d * value
    tl.store(y + (s * H + h) * P + p, out.to(y.dtype.element_ty), mask=p < P)


def dense_rows(t: Tensor) -> Tensor:
    """The tensor itself when everything behind its first dimension is dense, else a copy."""
    return t if t[:1].is_contiguous() else t.contiguous()


def launch_plan(sequences: int, channels: int, dtype: torch.dtype) -> tuple[int, int]:
    """(channels, warps) of a program. bf16: the best of an H200 at 1, 8, 64 and 256 sequences, before the rounding.

    Its eight warps share out channels, so from a state size of 128 on the sum over a state is made in the same order
    whatever the number of sequences.
    """
    most = next_power_of_2(channels)
    if dtype == torch.float32:
        return min(16, most), 1
    if sequences < 4:
        return min(16, most), 8
    return min(32 if sequences < 32 else 64, most), 8


def state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    meta: StepMetadata,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """As the reference: x [S, H, P], dt [S, H], B and C [S, G, N] (first dimension may be strided), one token each."""
    rounding.check(ssm_state.dtype)
    sequences, heads, channels = x.shape
    size = B.shape[2]
    y = torch.empty(sequences, heads, channels, dtype=x.dtype, device=x.device)
    if not sequences:
        return y
    x, dt, B, C = (dense_rows(t) for t in (x, dt, B, C))
    block, warps = launch_plan(sequences, channels, ssm_state.dtype)
    lengths = None if ssm_state.dtype == torch.float32 else meta.seq_lens
    pdl = dependent_launch(x)
    _update[(-(-channels // block), heads, sequences)](
        x, dt, A, B, C, D, dt_bias, ssm_state, y, meta.state_slots, meta.written_slots, meta.has_state, lengths,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), ssm_state.stride(0), *dt_limit, heads, channels, size,
        next_power_of_2(size), heads // B.shape[1], block, pdl, num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y
