"""Finds where top-k and top-p cut a row, exactly and without sorting it.

Scaled logits are <= 0 (the row's maximum is subtracted), so the bits of their absolute value are integers in reversed
order: a cut is the smallest 31-bit key whose logits reach the wanted count or mass, found by bisection. A whole
vocabulary is too much for one program to read 31 times, so a row is first thinned by all programs together: `census`
counts each chunk's logits above seven bounds, `compact` copies those above the lowest bound that CAP places can hold,
in order of id (no atomics: sums do not depend on timing), and `solve` bisects among them in registers. When they cannot
hold the cut (a very flat row), `solve` reads the whole row instead: slower, same answer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEVELS = 8  # seven bounds and everything
CAP = 4096
"""Logits of a row that `solve` holds in registers."""
EVERYTHING = tl.constexpr(2147483647)
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
def _bounds(level):
    """How far below the maximum each level reaches: 0.5, 1, 2, 4, 6, 9, 14, everything."""
    low = tl.where(level == 0, 0.5, tl.where(level == 1, 1.0, tl.where(level == 2, 2.0, 4.0)))
    high = tl.where(level == 4, 6.0, tl.where(level == 5, 9.0, tl.where(level == 6, 14.0, float("inf"))))
    return tl.where(level < 4, low, high)


@triton.jit
def _asked(top_k, top_p, row, V, K: tl.constexpr, P: tl.constexpr):
    """The row's top-k (0: off) and top-p (1: off)."""
    k = 0
    p = 1.0
    if K:
        k = tl.load(top_k + row).to(tl.int32)
        k = tl.where((k > 0) & (k < V), k, 0)
    if P:
        p = tl.load(top_p + row)
    return k, p


@triton.jit
def census(
    shaped, tops, temperature, top_k, top_p, counts, masses, V,
    K: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): logits of the chunk above each level's bound, counts and masses [R, chunks, 8]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row)
    k, p = _asked(top_k, top_p, row, V, K, P)
    if (t > 0.0) & ((k > 0) | (p < 1.0)):
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        scaled = scaled_logits(shaped, tops, row, v, V, t, CHUNKS, CP)
        level = tl.arange(0, 8)
        inside = (scaled[None, :] >= -_bounds(level)[:, None]) & (v < V)[None, :]
        at = (row * CHUNKS + chunk) * 8 + level
        tl.store(counts + at, tl.sum(inside.to(tl.int32), 1))
        if P:
            tl.store(masses + at, tl.sum(tl.where(inside, tl.exp(scaled)[None, :], 0.0), 1))


@triton.jit
def _level(counts, row, LIMIT: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr):
    """Lowest bound whose logits fit in LIMIT places (-1: none), and how many they are."""
    c = tl.arange(0, CP)
    level = tl.arange(0, 8)
    each = tl.load(counts + (row * CHUNKS + c[:, None]) * 8 + level[None, :], mask=(c < CHUNKS)[:, None], other=0)
    total = tl.sum(each, 0)
    chosen = tl.sum(((total <= LIMIT) & (level < 7)).to(tl.int32), 0) - 1
    return chosen, tl.sum(tl.where(level == chosen, total, 0), 0)


@triton.jit
def compact(
    shaped, tops, temperature, top_k, top_p, counts, kept, V,
    K: tl.constexpr, P: tl.constexpr, LIMIT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): copy the chunk's scaled logits above the row's bound to kept [R, LIMIT], in id order."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row)
    k, p = _asked(top_k, top_p, row, V, K, P)
    if (t > 0.0) & ((k > 0) | (p < 1.0)):
        level, _ = _level(counts, row, LIMIT, CHUNKS, CP)
        if level >= 0:
            c = tl.arange(0, CP)
            before = tl.sum(tl.load(counts + (row * CHUNKS + c) * 8 + level, mask=c < chunk, other=0), 0)
            v = chunk * CHUNK + tl.arange(0, CHUNK)
            scaled = scaled_logits(shaped, tops, row, v, V, t, CHUNKS, CP)
            inside = (scaled >= -_bounds(level)) & (v < V)
            place = before + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(kept + row * LIMIT + place, scaled, mask=inside)


@triton.jit
def _reach(shaped, tops, row, V, t, key, within, MASS: tl.constexpr, LIMIT: tl.constexpr, CHUNKS: tl.constexpr,
           CP: tl.constexpr):  # fmt: skip
    """Count (or mass) of the whole row's logits with keys <= min(key, within), read from memory."""
    total = 0.0
    for v0 in range(0, V, LIMIT):
        v = v0 + tl.arange(0, LIMIT)
        scaled = scaled_logits(shaped, tops, row, v, V, t, CHUNKS, CP)
        inside = (key_of(scaled) <= tl.minimum(key, within)) & (v < V)
        if MASS:
            total += tl.sum(tl.where(inside, tl.exp(scaled), 0.0), 0)
        else:
            total += tl.sum(inside.to(tl.float32), 0)
    return total


@triton.jit
def solve(
    shaped, tops, temperature, top_k, top_p, counts, masses, kept, cut, V,
    K: tl.constexpr, P: tl.constexpr, LIMIT: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): cut[row] int32 = the largest key that survives top-k and top-p."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k, p = _asked(top_k, top_p, row, V, K, P)
    answer = 2147483647
    if (t > 0.0) & ((k > 0) | (p < 1.0)):
        _, held = _level(counts, row, LIMIT, CHUNKS, CP)
        i = tl.arange(0, LIMIT)
        scaled = tl.load(kept + row * LIMIT + i, mask=i < held, other=float("-inf"))
        key = tl.where(i < held, key_of(scaled), 2147483647)
        enough = held >= k  # level -1 holds nothing
        if K and k > 0:
            low = 0
            high = 2147483647
            for _ in range(31):
                middle = low + (high - low) // 2
                if enough:
                    found = tl.sum((key <= middle).to(tl.float32), 0)
                else:
                    found = _reach(shaped, tops, row, V, t, middle, 2147483647, False, LIMIT, CHUNKS, CP)
                reached = found >= k
                high = tl.where(reached, middle, high)
                low = tl.where(reached, low, middle + 1)
            answer = high
        if P and p < 1.0:
            weight = tl.where(key <= answer, tl.exp(scaled), 0.0)
            inner = tl.sum(weight, 0)
            if k > 0:
                target = inner * p
                if not enough:
                    target = p * _reach(shaped, tops, row, V, t, answer, answer, True, LIMIT, CHUNKS, CP)
            else:
                c = tl.arange(0, CP)
                total = tl.sum(tl.load(masses + (row * CHUNKS + c) * 8 + 7, mask=c < CHUNKS, other=0.0), 0)
                target = total * p
                enough = inner >= target
            low = 0
            high = answer
            for _ in range(31):
                middle = low + (high - low) // 2
                if enough:
                    found = tl.sum(tl.where(key <= middle, weight, 0.0), 0)
                else:
                    found = _reach(shaped, tops, row, V, t, middle, answer, True, LIMIT, CHUNKS, CP)
                # At the upper end nothing is left to cut, whatever rounding says of the last sum.
                reached = (found >= target) | (middle >= answer)
                high = tl.where(reached, middle, high)
                low = tl.where(reached, low, tl.minimum(middle + 1, answer))
            answer = high
    tl.store(cut + row, answer)
