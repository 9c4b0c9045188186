"""Chunked Mamba2 scan: a program carries the state of a few channels of one head through the tiles of a sequence.

Inside a tile of BT tokens the recurrence is a masked matrix product (state-space duality, Dao and Gu 2024, section 6);
between tiles the state stays in registers. Short sequences take one launch: the state is read once and written once. A
long sequence would be one program per head for a long time, so it is cut into segments: their own contributions to the
state first (`segment_states`), then a pass over segments (`pass_states`), then all segments' outputs in parallel, each
from the state that reaches it. Source of the three-step form: mamba_ssm and vLLM, where it takes five kernels.
The state is kept transposed [N, BP], so that no accumulator is transposed on its way into another product (wrong
numbers on Triton 3.4 to 3.7 / Hopper). Products with the state use tf32, the others the model's dtype; sums are fp32.
Measured on an H200 (48 x 64 x 128): one sequence of 8,192 tokens 331 us (772 without segments), 16 of 512 223 us, 40
tokens 9.9 us. Tuning met a silently wrong tile (16 channels, 64 tokens, 8 warps: error 0.28), hence its checks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram_kernels.launch import next_power_of_2
from engram_kernels.metadata import StepMetadata
from engram_kernels.ssd_scan.segments import pass_states, segment_states
from engram_kernels.state_update.kernel import dense_rows, softplus_clamped
from engram_kernels.tuning import tuned
from engram_kernels.varlen import find_block

SEGMENT = 512
"""Tokens of a segment; a step without a longer chunk takes one launch."""


@triton.jit(do_not_specialize=["num_seqs"])
def _scan(
    x, dt, A, B, C, skip, dt_bias, state, y, query_start, slots, has_state, num_seqs,
    x_stride, dt_stride, b_stride, c_stride, state_stride, low, high,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, PER_GROUP: tl.constexpr, BP: tl.constexpr,
    BT: tl.constexpr, STAGES: tl.constexpr, SEGMENT: tl.constexpr, SP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (channel block, head, sequence), the state in slots of `state`, read and written.

    With SEGMENT: program (channel block, head, segment), the segment's first state in state [segments, H, P, N], read.
    """
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    h = tl.program_id(1)
    n = tl.arange(0, NP)
    i = tl.arange(0, BT)
    keep_state = (n[:, None] < N) & (p[None, :] < P)
    at_state = state + (h * P + p)[None, :] * N + n[:, None]
    if SEGMENT > 0:
        s, t_first = find_block(query_start, 0, num_seqs, tl.program_id(2), SP, SEGMENT)
        s = tl.minimum(s, num_seqs - 1)
        at_state += tl.program_id(2).to(tl.int64) * (H * P * N)
        carried = tl.load(at_state, mask=keep_state, other=0.0).to(tl.float32)
    else:
        s = tl.program_id(2)
        t_first = 0
        at_state += tl.load(slots + s) * state_stride
        carried = tl.load(at_state, mask=keep_state & (tl.load(has_state + s) != 0), other=0.0).to(tl.float32)
    start = tl.load(query_start + s)
    length = tl.load(query_start + s + 1) - start
    if SEGMENT > 0:
        length = tl.minimum(length, t_first + SEGMENT)
    a = tl.load(A + h).to(tl.float32)
    bias = tl.load(dt_bias + h).to(tl.float32)
    d = tl.load(skip + h).to(tl.float32)
    group = h // PER_GROUP * N + n
    dtype = x.dtype.element_ty
    for t0 in tl.range(t_first, length, BT, num_stages=STAGES):
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
        # What is forgotten after a token, summed from the end: differences of `total` lose digits where it is large.
        later = tl.cumsum(step * a, 0, reverse=True) - step * a
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
        weighted = xt.to(tl.float32) * (step * tl.exp(later))[:, None]
        carried = tl.dot(b_t.to(tl.float32), weighted, carried * tl.exp(end), input_precision=PRECISION)
    if SEGMENT == 0:
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
    """As the reference, which also says how a bf16 state is rounded; the first dimension of x, dt, B, C may be strided.

    chunk_size is the model's; results do not depend on it beyond rounding, and tiles of the tuning table are used here.
    """
    tokens, heads, channels = x.shape
    size = B.shape[2]
    y = torch.empty(tokens, heads, channels, dtype=x.dtype, device=x.device)
    sequences = meta.num_sequences
    if not sequences:
        return y
    x, dt, B, C = (dense_rows(t) for t in (x, dt, B, C))
    fp32 = x.dtype == torch.float32
    precision = "ieee" if fp32 else "tf32"
    config = tuned("ssd_scan", {"dtype": str(x.dtype).removeprefix("torch.")})
    block = min(config["channels"], max(16, next_power_of_2(channels)))
    shape = (heads, channels, size, max(16, next_power_of_2(size)), heads // B.shape[1], block, config["tokens"])
    strides = (x.stride(0), dt.stride(0), B.stride(0), C.stride(0), ssm_state.stride(0), *dt_limit)
    tail = (config["stages"],)
    columns = -(-channels // block)
    if max(meta.query_lens_host) <= SEGMENT:
        _scan[(columns, heads, sequences)](
            x, dt, A, B, C, D, dt_bias, ssm_state, y, meta.query_start, meta.state_slots, meta.has_state, sequences,
            *strides, *shape, *tail, 0, 1, precision, num_warps=config["warps"],
        )  # fmt: skip
        return y
    padded = next_power_of_2(sequences)
    segments = meta.chunk_blocks(SEGMENT)
    states = torch.empty(segments, heads, channels, size, dtype=torch.float32, device=x.device)
    decays = torch.empty(segments, heads, dtype=torch.float32, device=x.device)
    segment_states[(columns, heads, segments)](
        x, dt, A, B, dt_bias, states, decays, meta.query_start, sequences, x.stride(0), dt.stride(0), B.stride(0),
        *dt_limit, *shape, *tail, SEGMENT, padded, precision, num_warps=config["warps"],
    )  # fmt: skip
    words = channels * size
    pass_states[(-(-words // 1024), heads, sequences)](
        states, decays, ssm_state, meta.query_start, meta.state_slots, meta.has_state, ssm_state.stride(0), sequences,
        heads, words, SEGMENT, padded, 1024, num_warps=4,
    )  # fmt: skip
    _scan[(columns, heads, segments)](
        x, dt, A, B, C, D, dt_bias, states, y, meta.query_start, meta.state_slots, meta.has_state, sequences,
        *strides, *shape, *tail, SEGMENT, padded, precision, num_warps=config["warps"],
    )  # fmt: skip
    return y
