"""The parallel part of a long scan: what each segment adds to the state, and the states between segments."""

from __future__ import annotations

import triton
import triton.language as tl

from engram_kernels.state_update.kernel import softplus_clamped
from engram_kernels.varlen import find_block


@triton.jit(do_not_specialize=["num_seqs"])
def segment_states(
    x, dt, A, B, dt_bias, states, decays, query_start, num_seqs, x_stride, dt_stride, b_stride, low, high,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, PER_GROUP: tl.constexpr, BP: tl.constexpr,
    BT: tl.constexpr, STAGES: tl.constexpr, SEGMENT: tl.constexpr, SP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (channel block, head, segment): the state a segment leaves when it starts from zero, into
    states [segments, H, P, N] fp32; the log of what it keeps of an earlier state, into decays [segments, H]."""
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    h = tl.program_id(1)
    segment = tl.program_id(2)
    n = tl.arange(0, NP)
    i = tl.arange(0, BT)
    s, t_first = find_block(query_start, 0, num_seqs, segment, SP, SEGMENT)
    s = tl.minimum(s, num_seqs - 1)
    start = tl.load(query_start + s)
    length = tl.minimum(tl.load(query_start + s + 1) - start, t_first + SEGMENT)
    a = tl.load(A + h).to(tl.float32)
    bias = tl.load(dt_bias + h).to(tl.float32)
    group = h // PER_GROUP * N + n
    carried = tl.zeros((NP, BP), tl.float32)
    kept = 0.0
    for t0 in tl.range(t_first, length, BT, num_stages=STAGES):
        live = t0 + i < length
        row = (start + t0 + i).to(tl.int64)
        keep = live[:, None] & (p[None, :] < P)
        xt = tl.load(x + row[:, None] * x_stride + (h * P + p)[None, :], mask=keep, other=0.0)
        mask_t = live[None, :] & (n[:, None] < N)
        b_t = tl.load(B + row[None, :] * b_stride + group[:, None], mask=mask_t, other=0.0)
        step = tl.load(dt + row * dt_stride + h, mask=live, other=0.0).to(tl.float32) + bias
        step = tl.where(live, softplus_clamped(step, low, high), 0.0)
        # What is forgotten after a token, summed from the end: differences of sums from the start lose digits.
        later = tl.cumsum(step * a, 0, reverse=True) - step * a
        end = tl.sum(step * a, 0)
        weighted = xt.to(tl.float32) * (step * tl.exp(later))[:, None]
        carried = tl.dot(b_t.to(tl.float32), weighted, carried * tl.exp(end), input_precision=PRECISION)
        kept += end
    at = states + (segment.to(tl.int64) * H + h) * (P * N) + p[None, :] * N + n[:, None]
    tl.store(at, carried, mask=(n[:, None] < N) & (p[None, :] < P))
    if tl.program_id(0) == 0:
        tl.store(decays + segment * H + h, kept)


@triton.jit(do_not_specialize=["num_seqs"])
def pass_states(
    states, decays, ssm_state, query_start, slots, has_state, state_stride, num_seqs,
    H: tl.constexpr, WORDS: tl.constexpr, SEGMENT: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (part, head, sequence): replace each segment's own state by the one that reaches it; the last one goes
    to the sequence's slot of ssm_state [slots, H, P, N]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.program_id(1)
    s = tl.program_id(2)
    q = tl.arange(0, SP)
    first = tl.load(query_start + q, mask=q < num_seqs, other=0)
    counts = (tl.load(query_start + q + 1, mask=q < num_seqs, other=0) - first + SEGMENT - 1) // SEGMENT
    begin = tl.sum(tl.where(q < s, counts, 0), 0)
    count = tl.sum(tl.where(q == s, counts, 0), 0)
    slot = ssm_state + tl.load(slots + s) * state_stride + h * WORDS + i
    keep = i < WORDS
    carried = tl.load(slot, mask=keep & (tl.load(has_state + s) != 0), other=0.0).to(tl.float32)
    for segment in range(begin, begin + count):
        at = states + (tl.cast(segment, tl.int64) * H + h) * WORDS + i
        own = tl.load(at, mask=keep, other=0.0)
        tl.store(at, carried, mask=keep)
        carried = carried * tl.exp(tl.load(decays + segment * H + h)) + own
    tl.store(slot, carried.to(ssm_state.dtype.element_ty), mask=keep)
