"""States kept in bf16: what rounding by chance promises, and what rounding to nearest would lose."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_kernels import Ops
from engram_kernels.state_update.rounding import chances, stored
from tests.support.kernel_cases import exact_update
from tests.unit.kernels.steps import make_step, relative_rms

BF16 = torch.bfloat16
SHAPE = (4, 16, 2, 24)
PLACES = torch.Size((4, 16, 24))
LENGTHS = torch.arange(1, 4097, dtype=torch.int32)


def test_chances_are_even_and_independent_of_each_other() -> None:
    """Deterministic numbers, so nothing here can fail by bad luck: bounds are 5 standard errors of true chance."""
    drawn = chances(LENGTHS, torch.Size((2, 8, 16))).flatten(1).double() / 65536
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    count = drawn.numel()
    even = torch.histc(drawn, 64, 0.0, 1.0)
    assert abs(float((even - count / 64).square().sum() / (count / 64)) - 63) < 5 * (2 * 63) ** 0.5
    centred = (drawn - 0.5) * 12**0.5
    assert float(centred.mean().abs()) < 5 / count**0.5
    for apart in (1, 2, 16, 64, 256, 1024):  # the same place, tokens apart
        assert float((centred[apart:] * centred[:-apart]).mean().abs()) < 5 / (count - 256 * apart) ** 0.5
    for apart in (1, 2, 16, 128):  # the same token, places apart: in the state's rows and columns
        assert float((centred[:, apart:] * centred[:, :-apart]).mean().abs()) < 0.01


@settings(max_examples=100)
@given(bits=st.integers(0, 2**31 - 1 - (128 << 16)), negative=st.booleans(), place=st.integers(0, 383))
def test_the_mean_of_many_roundings_is_the_value(bits: int, negative: bool, place: int) -> None:
    """Any finite value, at any place: the mean over n = 4096 tokens is within 6 / (2 sqrt(n)) of a unit of it, which
    true chance would miss once in 5e8 times; every single one is one of the two numbers next to it. In integers, since
    a process may be set to take the smallest floats for zero."""
    value = torch.tensor([bits - (1 << 31) if negative else bits], dtype=torch.int32).view(torch.float32)
    state = value.expand(LENGTHS.numel(), 1, 1, 384)
    got = stored(state, LENGTHS, BF16)[:, 0, 0, place].view(torch.int16).int() & 0xFFFF
    away = got - ((bits >> 16) + (1 << 15) * negative)
    assert set(away.tolist()) <= {0, 1}
    assert abs(float(away.double().mean()) - (bits & 0xFFFF) / 65536) <= 6 * 0.5 / LENGTHS.numel() ** 0.5


def test_what_is_not_finite_stays() -> None:
    everything = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000, 0, 0x7F7FFFFF], dtype=torch.int32)
    values = everything.view(torch.float32)
    values = torch.cat((values, -values))
    got = stored(values.expand(4096, 1, 1, 12), LENGTHS, BF16)[:, 0, 0].float()
    nan = values.isnan()
    assert bool(got[:, nan].isnan().all())
    exact = values[[3, 4, 9, 10]]
    assert torch.equal(got[:, [3, 4, 9, 10]], exact.expand(4096, 4))
    # The largest fp32 lies above the largest bf16, next to infinity: never a NaN, never a smaller number.
    assert bool((got[:, 5] >= torch.finfo(BF16).max).all())


def test_fp32_is_stored_as_it_is_and_other_dtypes_are_refused(ops: Ops) -> None:
    state = torch.randn(2, 3, 4, 5)
    assert stored(state, LENGTHS[:2], torch.float32) is state
    arguments, limit = exact_update(1, SHAPE)
    half = torch.zeros(1, 4, 16, 24, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^ssm_state must be float32 or bfloat16, got float16"):
        ops.state_update(*arguments, half, make_step([1], [5]), limit)


def test_the_reference_rounds_by_the_length_of_a_sequence_and_the_place(ops: Ops) -> None:
    """By hand, for every element: the lower half of the hash's bits decides, and nothing else does."""
    lengths = (2, 77, 4096)
    meta = make_step([1] * 3, lengths, state_slots=[3, 0, 2])
    arguments, limit = exact_update(3, SHAPE)
    state = torch.randn(5, *PLACES).to(BF16)
    wide = state.float()
    out = ops.state_update(*arguments, state, meta, limit)
    assert torch.equal(out, ops.state_update(*arguments, wide, meta, limit))  # y is of the state before it is rounded

    def mixed(word: int) -> int:
        word = word * 0x7FEB352D % 2**32
        return (word ^ word >> 15) * 0x846CA68B % 2**32

    chooser = random.Random(0)
    for slot, length in zip((3, 0, 2), lengths, strict=True):
        key = mixed(length)
        key ^= key >> 16
        exact, got = wide[slot].flatten().view(torch.int32).tolist(), state[slot].flatten().view(torch.int16).tolist()
        for place in chooser.sample(range(PLACES.numel()), 200):
            expected = ((exact[place] % 2**32) + (mixed(key ^ place) >> 16)) >> 16
            assert got[place] % 2**16 == expected
    assert not torch.equal(wide.to(BF16), state)


def test_neither_slots_nor_company_nor_order_change_a_bit(ops: Ops) -> None:
    lengths = [9, 300, 41, 8]
    arguments, limit = exact_update(4, SHAPE)
    states = torch.randn(4, *PLACES).to(BF16)

    def run(order: list[int], slots: list[int], targets: list[int]) -> dict[int, torch.Tensor]:
        pool = torch.full((9, 2, *PLACES), float("nan"), dtype=BF16)
        pool[slots, 1] = states[order]
        meta = make_step([1] * len(order), [lengths[s] for s in order], state_slots=slots)
        meta = dataclasses.replace(meta, state_targets=torch.tensor(targets))
        mine = [a[order] if a.shape[0] == 4 and a is not arguments[2] else a for a in arguments]
        ops.state_update(*mine[:2], arguments[2], *mine[3:5], *arguments[5:], pool[:, 1], meta, limit)
        return {s: pool[target, 1].clone() for s, target in zip(order, targets, strict=True)}

    together = run([0, 1, 2, 3], [4, 3, 2, 1], [4, 3, 2, 1])
    apart: dict[int, torch.Tensor] = {}
    for order, slots, targets in (([3, 1], [0, 6], [5, 7]), ([2], [8], [8]), ([0], [1], [3])):
        apart |= run(order, slots, targets)
    for sequence, state in together.items():
        assert torch.equal(apart[sequence].view(torch.int16), state.view(torch.int16))
    # Another token of the same sequence has other chances.
    lengths[0] += 1
    assert not torch.equal(run([0], [4], [4])[0], together[0])


def test_small_updates_add_up_and_to_nearest_they_would_be_lost(ops: Ops) -> None:
    """A state of 1 that nothing is forgotten of, and 800 tokens that each add an eighth of its unit (1/128).

    To nearest it stays 1 for good. By chance it follows the sum, 1.78. A token's error has a variance of 7/64 squared
    units, so an element is off by 0.073 (the bound is six times that) and the mean of 1,536 by 0.24 % of what was added
    (the bound is four times that).
    """
    heads, channels, groups, size = SHAPE
    x = torch.full((1, heads, channels), 2.0**-9)
    ones, zero = torch.ones(1, groups, size), torch.zeros(heads)
    arguments = (x, torch.ones(1, heads), zero, ones, ones, zero, zero)
    exact, by_chance, to_nearest = (torch.ones(1, *PLACES, dtype=d) for d in (torch.float32, BF16, BF16))
    for length in range(2, 802):
        meta = make_step([1], [length])
        ops.state_update(*arguments, exact, meta, (0.5, 0.5))
        ops.state_update(*arguments, by_chance, meta, (0.5, 0.5))
        rounded = to_nearest.float()
        ops.state_update(*arguments, rounded, meta, (0.5, 0.5))
        to_nearest = rounded.to(BF16)
    added = exact - 1
    assert torch.equal(added, torch.full_like(added, 800 / 1024))
    assert torch.equal(to_nearest, torch.ones_like(to_nearest))
    errors = by_chance.float() - exact
    assert float(errors.mean().abs()) < 0.01 * 800 / 1024
    assert float(errors.abs().max()) < 0.45


def test_a_long_decode_does_not_drift(ops: Ops) -> None:
    """Heads that remember 3, 30, 300 and 3,000 tokens, whose updates mostly have one sign, and 1,500 tokens.

    By chance the outputs of every head stay within 2 % of fp32's, and no further off at the end than a thousand tokens
    before, memory being full. To nearest the two long memories stop growing where a token adds less than half a unit.
    """
    heads, channels, size = 4, 8, 16
    forget, zero = -torch.tensor([0.3, 0.03, 0.003, 0.0003]), torch.zeros(heads)
    exact, by_chance, to_nearest = (torch.zeros(1, heads, channels, size, dtype=d) for d in (torch.float32, BF16, BF16))
    outputs = []
    for length in range(2, 1502):
        meta = make_step([1], [length])
        x, b, c = (
            1 + scale * torch.randn(1, n, m) for scale, n, m in ((0.1, heads, channels), (0.1, 1, size), (1.0, 1, size))
        )
        arguments = (x, torch.ones(1, heads), forget, b, c, zero, zero)
        rounded = to_nearest.float()
        states = exact, by_chance, rounded
        outputs.append(torch.stack([ops.state_update(*arguments, state, meta, (1.0, 1.0)) for state in states]))
        to_nearest = rounded.to(BF16)
    truth, ours, nearest = torch.cat(outputs, dim=1)  # [tokens, H, P] each

    def error(got: torch.Tensor, first: int, last: int) -> list[float]:
        return [relative_rms(got[first:last, head], truth[first:last, head]) for head in range(heads)]

    early, late = error(ours, 300, 600), error(ours, 1000, 1500)
    assert max(late) < 0.02
    assert all(after < 1.3 * before for before, after in zip(early, late, strict=True))
    lost = error(nearest, 1000, 1500)
    assert lost[2] > 0.1
    assert lost[3] > 0.3
    assert lost[3] > 2 * error(nearest, 300, 600)[3]
