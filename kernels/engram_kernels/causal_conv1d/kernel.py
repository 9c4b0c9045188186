"""Causal depthwise convolution with SiLU over a mixed step; the window of each sequence is carried in place.

Decodes: one program reads a sequence's window, computes, and writes the shifted window, to another slot if the step
says so. Chunks: outputs first, in parallel over blocks of tokens, then a second launch writes the windows, because a
chunk's first block reads the old window while its last one would overwrite it. Taps are few, so inputs are read once
per tap from the L1.
Measured on an H200, 3,328 channels: 8,192 tokens in 66 us (39 % of the copy rate), a chunk of 40 in 5.5 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engram_kernels.launch import dependent_launch, next_power_of_2
from engram_kernels.metadata import StepMetadata
from engram_kernels.varlen import find_block

TOKENS = 32


@triton.jit
def _silu(value):
    return value / (1.0 + tl.exp(-value))


@triton.jit
def _step(
    x, weight, bias, state, y, slots, targets, has_state, x_stride, state_stride,
    C: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (decode, channel block). state [slots, C, W - 1], slot stride state_stride, from slots to targets."""
    if USE_PDL:
        gdc_launch_dependents()
    s = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = c < C
    # The window is that of an earlier step: its read need not wait for this one's kernels.
    j = tl.arange(0, WP)
    at = c[:, None] * (W - 1) + j[None, :]
    inside = keep[:, None] & (j[None, :] < W - 1)
    window = state + tl.load(slots + s) * state_stride
    shifted = state + tl.load(targets + s) * state_stride
    old = tl.load(window + at, mask=inside & (tl.load(has_state + s) != 0), other=0.0)
    taps = tl.load(weight + c[:, None] * W + j[None, :], mask=inside, other=0.0).to(tl.float32)
    acc = tl.sum(old.to(x.dtype.element_ty).to(tl.float32) * taps, 1)
    if BIAS:
        acc += tl.load(bias + c, mask=keep, other=0.0).to(tl.float32)
    last = tl.load(weight + c * W + W - 1, mask=keep, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    tl.debug_barrier()  # a tap may be read by one thread and, one place further on, written by another
    new = tl.load(x + s * x_stride + c, mask=keep, other=0.0)
    acc += new.to(tl.float32) * last
    tl.store(y + s * C + c, _silu(acc).to(y.dtype.element_ty), mask=keep)
    tl.store(shifted + at - 1, old, mask=inside & (j[None, :] > 0))
    tl.store(shifted + c * (W - 1) + W - 2, new.to(state.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["seq0", "num_seqs"])
def _chunks(
    x, weight, bias, state, y, query_start, slots, has_state, seq0, num_seqs, x_stride, state_stride,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, SP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Program (token block, channel block): BT outputs of one sequence; the windows are only read."""
    s, t0 = find_block(query_start, seq0, num_seqs, tl.program_id(0), SP, BT)
    if s < num_seqs:
        q0 = tl.load(query_start + seq0 + s)
        new = tl.load(query_start + seq0 + s + 1) - q0
        t = t0 + tl.arange(0, BT)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        keep = c < C
        window = state + tl.load(slots + seq0 + s) * state_stride
        valid = tl.load(has_state + seq0 + s) != 0
        acc = tl.zeros((BT, BLOCK), tl.float32)
        if BIAS:
            acc += tl.load(bias + c, mask=keep, other=0.0).to(tl.float32)[None, :]
        for j in tl.static_range(W):
            at = t - (W - 1 - j)  # negative: that many steps into the window
            row = (q0 + at).to(tl.int64)
            inside = ((at >= 0) & (at < new))[:, None] & keep[None, :]
            value = tl.load(x + row[:, None] * x_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
            if (j < W - 1) and (t0 == 0):  # only a sequence's first block looks into the window
                before = (at < 0)[:, None] & keep[None, :] & valid
                old = tl.load(window + (c * (W - 1))[None, :] + (W - 1 + at)[:, None], mask=before, other=0.0)
                value += old.to(x.dtype.element_ty).to(tl.float32)
            acc += value * tl.load(weight + c * W + j, mask=keep, other=0.0).to(tl.float32)[None, :]
        out = (q0 + t).to(tl.int64)[:, None] * C + c[None, :]
        tl.store(y + out, _silu(acc).to(y.dtype.element_ty), mask=(t < new)[:, None] & keep[None, :])


@triton.jit(do_not_specialize=["seq0"])
def _windows(
    x, state, query_start, slots, has_state, seq0, x_stride, state_stride,
    C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (chunk, channel block): leave the last W - 1 inputs behind; a short chunk keeps some of the old ones."""
    s = seq0 + tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = c < C
    q0 = tl.load(query_start + s)
    new = tl.load(query_start + s + 1) - q0
    window = state + tl.load(slots + s) * state_stride + c * (W - 1)
    valid = tl.load(has_state + s) != 0
    for j in tl.static_range(W - 1):  # ascending: place j is read (as j + new) before it is written
        at = new - (W - 1) + j
        value = tl.load(x + (q0 + at).to(tl.int64) * x_stride + c, mask=keep & (at >= 0), other=0.0)
        old = tl.load(window + W - 1 + at, mask=keep & (at < 0) & valid, other=0.0)
        tl.store(window + j, tl.where(at >= 0, value.to(state.dtype.element_ty), old), mask=keep)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, meta: StepMetadata) -> Tensor:
    """x [T, C] (rows may be strided), weight [C, W], conv_state [slots, C, W - 1] (a view of one layer); as the
    reference: decodes first, then chunks."""
    tokens, channels = x.shape
    width = weight.shape[1]
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    decodes = meta.num_decodes
    shape = (channels, width)
    some_bias = weight if bias is None else bias
    if decodes:
        pdl = dependent_launch(x)
        _step[(decodes, -(-channels // 256))](
            x, weight, some_bias, conv_state, y, meta.state_slots, meta.written_slots, meta.has_state, x.stride(0),
            conv_state.stride(0), *shape, next_power_of_2(max(1, width - 1)), 256, bias is not None, pdl, num_warps=2,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    query_lens = meta.query_lens_host[decodes:]
    if query_lens:
        blocks = meta.chunk_blocks(TOKENS)
        wide = 64 if blocks <= 8 else 128  # channels of a program: few blocks have to fill the card
        _chunks[(blocks, -(-channels // wide))](
            x, weight, some_bias, conv_state, y, meta.query_start, meta.state_slots, meta.has_state, decodes,
            len(query_lens), x.stride(0), conv_state.stride(0), *shape, TOKENS, wide, next_power_of_2(len(query_lens)),
            bias is not None, num_warps=4,
        )  # fmt: skip
        _windows[(len(query_lens), -(-channels // 256))](
            x, conv_state, meta.query_start, meta.state_slots, meta.has_state, decodes, x.stride(0),
            conv_state.stride(0), *shape, 256, num_warps=2,
        )  # fmt: skip
    return y
