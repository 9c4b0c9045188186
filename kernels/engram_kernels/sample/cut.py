"""Finds where top-k and top-p cut a row, exactly (top-p: but for the rounding of sums) and without sorting it.

Scaled logits are <= 0 (the row's maximum is subtracted), so the bits of their absolute value are integers in reversed
order: a cut is the smallest 31-bit key whose logits reach the wanted count or mass, found by bisection. A whole
vocabulary is too much for one program to read 31 times, so a row is first thinned by all programs together: `census`
counts each chunk's logits above fifteen bounds, those that its largest logit reaches, and `plan` adds them up. When the
cut lies among few logits, `compact` copies all of those; when it lies deep in a flat row, `refine` cuts the level that
holds it into sixteen slices and `compact` copies only the slice with the cut, of which everything above is known
already. `solve` bisects among the copies in registers. There are no atomics, and copies are in order of id: sums do not
depend on timing. When even a slice is too full (thousands of
equal logits), `solve` reads the whole row instead: slower, same answer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEVELS = 16  # fifteen bounds and everything; and as many slices of one level
CAP = 8192
"""Logits of a row that `solve` holds in registers."""


@triton.jit
def scaled_logits(shaped, tops, row, v, V, temperature, CHUNKS: tl.constexpr, CP: tl.constexpr):
    """(shaped - row maximum) / temperature at columns v; -inf past V."""
    c = tl.arange(0, CP)
    peak = tl.max(tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), 0)
    value = tl.load(shaped + row.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    return (value - peak) / temperature


@triton.jit
def chunk_top(tops, row, chunk, temperature, CHUNKS: tl.constexpr, CP: tl.constexpr):
    """The largest of a chunk's scaled logits, to the bit."""
    c = tl.arange(0, CP)
    each = tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    return (tl.load(tops + row * CHUNKS + chunk) - tl.max(each, 0)) / temperature


@triton.jit
def key_of(scaled):
    """Order-reversing integer of a float <= 0."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def _bounds(level):
    """How far below the maximum each level reaches: 0.5 to 6 by 0.5, 8, 10, 14, everything."""
    far = tl.where(level == 12, 8.0, tl.where(level == 13, 10.0, tl.where(level == 14, 14.0, float("inf"))))
    return tl.where(level < 12, 0.5 * (level.to(tl.float32) + 1.0), far)


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
    """Program (row, chunk): logits of the chunk above each level's bound, counts and masses [R, chunks, 16]."""
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
        top = chunk_top(tops, row, chunk, t, CHUNKS, CP)
        level = tl.arange(0, 16)
        first = tl.sum((-_bounds(level) > top).to(tl.int32), 0)  # of the levels before it nothing is here
        count = tl.zeros((16,), tl.int32)
        mass = tl.zeros((16,), tl.float32)
        weight = tl.where(v < V, tl.exp(scaled), 0.0)
        for i in range(first, 16):
            inside = scaled >= -_pick(_bounds(level), i, 16)
            count = tl.where(level == i, tl.sum((inside & (v < V)).to(tl.int32), 0), count)
            if P:
                mass = tl.where(level == i, tl.sum(tl.where(inside, weight, 0.0), 0), mass)
        at = (row * CHUNKS + chunk) * 16 + level
        tl.store(counts + at, count)
        if P:
            tl.store(masses + at, mass)


@triton.jit
def _totals(table, row, N: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr):
    """[N] sums over the chunks of a [R, chunks, N] table."""
    c = tl.arange(0, CP)
    n = tl.arange(0, N)
    each = tl.load(table + (row * CHUNKS + c[:, None]) * N + n[None, :], mask=(c < CHUNKS)[:, None], other=0)
    return tl.sum(each, 0)


@triton.jit
def _pick(values, i, N: tl.constexpr):
    """Element i of a register vector, 0 for an index outside."""
    return tl.sum(tl.where(tl.arange(0, N) == i, values, 0))


@triton.jit
def plan(
    temperature, top_k, top_p, counts, masses, ints, floats, V,
    K: tl.constexpr, P: tl.constexpr, LIMIT: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): where its cut lies, so that no chunk has to add up the census again. ints [R, 4]: the first level
    that reaches the cut (or the widest one that fits), how many logits it has, the level of a deep cut or -1 (and its
    slice, by `plan_slice`); floats [R, 2]: the mass that top-p wants, the mass above the copies."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    k, p = _asked(top_k, top_p, row, V, K, P)
    if (tl.load(temperature + row) > 0.0) & ((k > 0) | (p < 1.0)):
        i = tl.arange(0, 16)
        count = _totals(counts, row, 16, CHUNKS, CP)
        widest = tl.sum(((count <= LIMIT) & (i < 15)).to(tl.int32), 0) - 1  # that fits; -1: none
        level = tl.where(k > 0, tl.sum((count < k).to(tl.int32), 0), 15)
        if P:
            mass = _totals(masses, row, 16, CHUNKS, CP)
            target = _pick(mass, 15, 16) * p
            first = tl.minimum(tl.sum((mass < target).to(tl.int32), 0), 15)
            deep = (p < 1.0) & (k == 0) & (first > widest)
            tl.store(ints + row * 4 + 2, tl.where(deep, first, -1))
            tl.store(floats + row * 2, target)
            tl.store(floats + row * 2 + 1, tl.where(deep, _pick(mass, first - 1, 16), 0.0))
            # A little more than the target, for `solve` adds up in another order.
            level = tl.where(k == 0, tl.sum((mass < target * 1.0001).to(tl.int32), 0), level)
        level = tl.minimum(level, widest)
        tl.store(ints + row * 4, level)
        tl.store(ints + row * 4 + 1, _pick(count, level, 16))


@triton.jit
def _slices(level, i):
    """The outer bound of slice i of a level, as a distance from the maximum; slice -1 ends where the level begins."""
    inner = tl.where(level == 0, 0.0, _bounds(tl.maximum(level - 1, 0)))
    outer = tl.where(level == 15, inner + 16.0, _bounds(level))
    edge = inner + (outer - inner) * ((i + 1).to(tl.float32) / 16.0)
    return tl.where((i == 15) & (level == 15), float("inf"), tl.where(i == 15, outer, edge))


@triton.jit
def _begun(scaled, level, i):
    """Which logits lie beyond the slices before slice i of a level."""
    return ((level == 0) & (i == 0)) | (scaled < -_slices(level, i - 1))


@triton.jit
def refine(
    shaped, tops, temperature, top_k, top_p, ints, slice_counts, slice_masses, V,
    K: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk) of a row whose top-p cut is deep: logits of the cut's level above each slice's outer bound,
    [R, chunks, 16]."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row)
    k, p = _asked(top_k, top_p, row, V, K, True)
    if (t > 0.0) & (k == 0) & (p < 1.0):
        deep = tl.load(ints + row * 4 + 2)
        if deep >= 0:
            v = chunk * CHUNK + tl.arange(0, CHUNK)
            scaled = scaled_logits(shaped, tops, row, v, V, t, CHUNKS, CP)
            top = chunk_top(tops, row, chunk, t, CHUNKS, CP)
            i = tl.arange(0, 16)
            edges = -_slices(deep, i)
            begun = _begun(scaled, deep, tl.zeros((), tl.int32)) & (v < V)
            weight = tl.where(begun, tl.exp(scaled), 0.0)
            count = tl.zeros((16,), tl.int32)
            mass = tl.zeros((16,), tl.float32)
            for n in range(tl.sum((edges > top).to(tl.int32), 0), 16):
                inside = scaled >= _pick(edges, n, 16)
                count = tl.where(i == n, tl.sum((inside & begun).to(tl.int32), 0), count)
                mass = tl.where(i == n, tl.sum(tl.where(inside, weight, 0.0), 0), mass)
            at = (row * CHUNKS + chunk) * 16 + i
            tl.store(slice_counts + at, count)
            tl.store(slice_masses + at, mass)


@triton.jit
def plan_slice(
    temperature, top_k, top_p, slice_counts, slice_masses, ints, floats, V,
    K: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row) of a row with a deep cut: the slice that reaches the mass still wanted (or the last one with
    logits) takes the level's place."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    k, p = _asked(top_k, top_p, row, V, K, True)
    if (tl.load(temperature + row) > 0.0) & (k == 0) & (p < 1.0):  # noqa: SIM102 - other rows have no ints
        if tl.load(ints + row * 4 + 2) >= 0:
            target = tl.load(floats + row * 2)
            above = tl.load(floats + row * 2 + 1)
            mass = _totals(slice_masses, row, 16, CHUNKS, CP)
            count = _totals(slice_counts, row, 16, CHUNKS, CP)
            i = tl.sum((mass < target - above).to(tl.int32), 0)
            # Rounding of a top-p close to one may leave even the level's end short of it: then its last logits.
            i = tl.minimum(i, tl.sum((count < _pick(count, 15, 16)).to(tl.int32), 0))
            tl.store(ints + row * 4 + 1, _pick(count, i, 16) - _pick(count, i - 1, 16))
            tl.store(ints + row * 4 + 3, i)
            tl.store(floats + row * 2 + 1, above + _pick(mass, i - 1, 16))


@triton.jit
def compact(
    shaped, tops, temperature, top_k, top_p, counts, slice_counts, ints, kept, V,
    K: tl.constexpr, P: tl.constexpr, LIMIT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): copy the chunk's scaled logits above the row's bound, or those of the slice with a deep
    cut, to kept [R, LIMIT] in id order."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row)
    k, p = _asked(top_k, top_p, row, V, K, P)
    if (t > 0.0) & ((k > 0) | (p < 1.0)):
        level = tl.load(ints + row * 4)
        held = tl.load(ints + row * 4 + 1)
        deep = -1
        i = 0
        bound = -_bounds(level)
        if P:
            deep = tl.load(ints + row * 4 + 2)
            if deep >= 0:
                i = tl.load(ints + row * 4 + 3)
                bound = -_slices(deep, i)
        top = chunk_top(tops, row, chunk, t, CHUNKS, CP)
        if (held > 0) & (held <= LIMIT) & (top >= bound):
            c = tl.arange(0, CP)
            v = chunk * CHUNK + tl.arange(0, CHUNK)
            scaled = scaled_logits(shaped, tops, row, v, V, t, CHUNKS, CP)
            inside = (scaled >= bound) & (v < V)
            if deep >= 0:
                inside = inside & _begun(scaled, deep, i)
                at = slice_counts + (row * CHUNKS + c) * 16 + i
                before = tl.sum(tl.load(at, mask=c < chunk, other=0), 0)
                before -= tl.sum(tl.load(at - 1, mask=(c < chunk) & (i > 0), other=0), 0)
            else:
                before = tl.sum(tl.load(counts + (row * CHUNKS + c) * 16 + level, mask=c < chunk, other=0), 0)
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
def _cut(
    shaped, tops, row, V, t, k, p, held, deep, target, base, kept,
    K: tl.constexpr, P: tl.constexpr, N: tl.constexpr, LIMIT: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """The largest key that survives, by bisection among the row's copies (no more than N, otherwise in memory)."""
    answer = 2147483647
    enough = held >= k  # level -1 holds nothing
    fits = held <= N
    i = tl.arange(0, N)
    scaled = tl.load(kept + row * LIMIT + i, mask=(i < held) & fits, other=float("-inf"))
    key = tl.where((i < held) & fits, key_of(scaled), 2147483647)
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
        weight = tl.where((key <= answer) & (key < 2147483647), tl.exp(scaled), 0.0)
        inner = tl.sum(weight, 0)
        if k > 0:
            target = inner * p
            if not enough:
                target = p * _reach(shaped, tops, row, V, t, answer, answer, True, LIMIT, CHUNKS, CP)
        else:
            # Of a slice the census said that it reaches the target; only rounding could say otherwise here.
            enough = (deep >= 0) & fits | (deep < 0) & (inner >= target)
        low = 0
        high = answer
        if (deep >= 0) & fits & (held > 0):  # somewhere in the slice, whatever rounding says of its ends
            low = tl.min(key, 0)
            high = tl.max(tl.where(i < held, key, 0), 0)
            answer = high
        for _ in range(31):
            middle = low + (high - low) // 2
            if enough:
                found = base + tl.sum(tl.where(key <= middle, weight, 0.0), 0)
            else:
                found = _reach(shaped, tops, row, V, t, middle, answer, True, LIMIT, CHUNKS, CP)
            # At the upper end nothing is left to cut, whatever rounding says of the last sum.
            reached = (found >= target) | (middle >= answer)
            high = tl.where(reached, middle, high)
            low = tl.where(reached, low, tl.minimum(middle + 1, answer))
        answer = high
    return answer


@triton.jit
def solve(
    shaped, tops, temperature, top_k, top_p, ints, floats, kept, cut, V,
    K: tl.constexpr, P: tl.constexpr, LIMIT: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): cut[row] int32 = the largest key that survives top-k and top-p. Most rows hold few copies."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k, p = _asked(top_k, top_p, row, V, K, P)
    answer = 2147483647
    if (t > 0.0) & ((k > 0) | (p < 1.0)):
        held = tl.load(ints + row * 4 + 1)
        base = 0.0  # mass of what lies above the copies
        target = 0.0
        deep = -1
        if P:
            deep = tl.load(ints + row * 4 + 2)
            target = tl.load(floats + row * 2)
            base = tl.load(floats + row * 2 + 1)
        few: tl.constexpr = LIMIT // 4
        rest = (held, deep, target, base, kept)
        if held <= few:
            answer = _cut(shaped, tops, row, V, t, k, p, *rest, K, P, few, LIMIT, CHUNKS, CP)
        else:
            answer = _cut(shaped, tops, row, V, t, k, p, *rest, K, P, LIMIT, LIMIT, CHUNKS, CP)
    tl.store(cut + row, answer)
