"""Finds where top-k and top-p cut a row, exactly and without sorting it.

Scaled logits are <= 0 (the row's maximum is subtracted), so the bits of their absolute value are integers in reversed
order: the cut is the smallest 31-bit key whose logits reach the wanted count or mass. Eight passes fix four bits each
(three in the last): all programs of a row measure 16 candidate keys over their chunk, and the next pass adds the
partial sums in a fixed order. Every pass writes its own slice of the scratch, so no pass overwrites what a program of
the same launch still reads. A vocabulary of 152k costs eight short launches whatever the number of rows; a sort of a
row costs several times that, and one program per row would leave the card idle.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PASSES = 8
SHIFTS = (27, 23, 19, 15, 11, 7, 3, 0)
EVERYTHING = 2**31 - 1
"""The key that keeps every token."""


@triton.jit
def scaled_logits(shaped, tops, row, v, V, temperature, CHUNKS: tl.constexpr, CP: tl.constexpr):
    """(shaped - row maximum) / temperature at columns v; -inf past V."""
    c = tl.arange(0, CP)
    peak = tl.max(tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
    value = tl.load(shaped + row.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    return (value - peak) / temperature


@triton.jit
def key_of(scaled):
    """Order-reversing integer of a float <= 0."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def _settled(sums, bases, wanted, row, rows, SHIFT: tl.constexpr, STEP: tl.constexpr, MASS: tl.constexpr,
             CHUNKS: tl.constexpr, CP: tl.constexpr):  # fmt: skip
    """Lower end of the key range after STEP passes. SHIFT is that of pass STEP - 1."""
    c = tl.arange(0, CP)
    j = tl.arange(0, 16)
    live = (c < CHUNKS)[:, None]
    target = wanted
    if MASS:
        first = sums + row * CHUNKS * 16
        target = wanted * tl.sum(tl.load(first + c * 16 + 15, mask=c < CHUNKS, other=0.0), 0)
    last = sums + ((STEP - 1) * rows + row) * CHUNKS * 16
    reached = tl.sum(tl.load(last + c[:, None] * 16 + j[None, :], mask=live, other=0.0), 0)
    # Rounding may leave a mass just short of the target unreached by the last candidate: then nothing is cut.
    digit = tl.minimum(tl.sum((reached < target).to(tl.int32), 0), 15)
    base = digit << SHIFT
    if STEP > 1:
        base += tl.load(bases + (STEP - 1) * rows + row)
    return base


@triton.jit(do_not_specialize=["rows"])
def measure(
    shaped, tops, temperature, wanted, within, sums, bases, rows, V,
    STEP: tl.constexpr, SHIFT: tl.constexpr, BEFORE: tl.constexpr, MASS: tl.constexpr, WITHIN: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk), pass STEP: count (or mass, MASS) of the chunk's logits up to each of 16 candidate keys.

    wanted [R]: top_k, or top_p with MASS. within [R] int32: keys above it are already cut (WITHIN). sums
    [passes, R, chunks, 16] fp32 and bases [passes + 1, R] int32 are scratch. BEFORE is the shift of the previous pass.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row)
    want = tl.load(wanted + row).to(tl.float32)
    if MASS:
        active = want < 1.0
    else:
        active = (want > 0.0) & (want < V)
    if active & (t > 0.0):
        base = 0
        if STEP > 0:
            base = _settled(sums, bases, want, row, rows, BEFORE, STEP, MASS, CHUNKS, CP)
            if chunk == 0:
                tl.store(bases + STEP * rows + row, base)
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        scaled = scaled_logits(shaped, tops, row, v, V, t, CHUNKS, CP)
        key = key_of(scaled)
        weight = tl.where(v < V, 1.0, 0.0)
        if MASS:
            weight = tl.exp(scaled)
        if WITHIN:
            weight = tl.where(key <= tl.load(within + row), weight, 0.0)
        out = sums + ((STEP * rows + row) * CHUNKS + chunk) * 16
        for j in tl.static_range(16):
            bound = base + (j << SHIFT) + ((1 << SHIFT) - 1)
            tl.store(out + j, tl.sum(tl.where(key <= bound, weight, 0.0), 0))


@triton.jit(do_not_specialize=["rows"])
def settle(
    temperature, wanted, sums, bases, cut, rows, V,
    STEPS: tl.constexpr, MASS: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): cut[row] = the key found by the STEPS passes of `measure`; everything where the row is not cut."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    want = tl.load(wanted + row).to(tl.float32)
    if MASS:
        active = want < 1.0
    else:
        active = (want > 0.0) & (want < V)
    key = 2147483647
    if active & (tl.load(temperature + row) > 0.0):
        key = _settled(sums, bases, want, row, rows, 0, STEPS, MASS, CHUNKS, CP)
    tl.store(cut + row, key)
