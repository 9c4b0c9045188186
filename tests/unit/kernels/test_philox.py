"""The random stream: published vectors, a second implementation, and Triton's mapping to [0, 1)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_kernels.sample.philox import philox4x32, uniform, uniform_row

WORD = 1 << 32

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def philox_by_hand(counter, key):
    """Python integers, written from the paper's description."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second // WORD) ^ c[1] ^ k[0], second % WORD, (first // WORD) ^ c[3] ^ k[1], first % WORD]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


def triton_uniform(word):
    """`tl.rand`'s reading of a word: signed, folded to non-negative, scaled in fp32."""
    signed = word - WORD if word >= WORD // 2 else word
    folded = -signed - 1 if signed < 0 else signed
    return float(torch.tensor(folded, dtype=torch.float32) * torch.tensor(4.6566127342e-10, dtype=torch.float32))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter, key, result):
    got = philox4x32(
        tuple(torch.tensor([word]) for word in words(counter)), tuple(torch.tensor([word]) for word in words(key))
    )
    assert [int(word) for word in got] == words(result)
    assert philox_by_hand(words(counter), words(key)) == words(result)


u32 = st.integers(0, WORD - 1)


@given(counters=st.lists(st.tuples(u32, u32, u32, u32), min_size=1, max_size=8), key=st.tuples(u32, u32))
def test_vectors_agree_with_python_integers(counters, key):
    columns = tuple(torch.tensor(column) for column in zip(*counters, strict=True))
    got = torch.stack(philox4x32(columns, tuple(torch.tensor(word) for word in key)), dim=-1)
    assert got.tolist() == [philox_by_hand(counter, key) for counter in counters]


def test_inputs_are_not_modified():
    counter = tuple(torch.arange(4) + i for i in range(4))
    key = torch.tensor([1]), torch.tensor([2])
    philox4x32(counter, key)
    assert [word.tolist() for word in counter] == [list(range(i, i + 4)) for i in range(4)]
    assert [int(word) for word in key] == [1, 2]


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**31), token=st.integers(0, 2**20))
def test_a_draw_is_addressed_by_seed_position_and_token(seed, position, token):
    # Ids 0 to 15 take the first words of counters 0 to 15, ids 16 to 31 their second words; 64 the next counters.
    counter, word = token // 64 * 16 + token % 16, token % 64 // 16
    word = philox_by_hand((counter, position, 0, 0), (seed % WORD, (seed >> 32) % WORD))[word]
    got = uniform(torch.tensor(seed), torch.tensor(position), torch.tensor([token]))
    assert got.dtype == torch.float32
    assert got.tolist() == [triton_uniform(word)]


@pytest.mark.parametrize("vocab", [1, 15, 16, 63, 64, 65, 1000])
def test_a_whole_row_is_the_draw_of_every_id(vocab):
    seeds, positions = torch.tensor([[3], [-4], [2**40 + 1]]), torch.tensor([[0], [7], [2**20]])
    assert torch.equal(uniform_row(seeds, positions, vocab), uniform(seeds, positions, torch.arange(vocab)))


def test_every_word_maps_below_one():
    assert triton_uniform(2**31 - 1) < 1.0
    assert triton_uniform(2**31) < 1.0
    assert triton_uniform(0) == triton_uniform(WORD - 1) == 0.0


def test_draws_are_uniform_and_do_not_repeat():
    draws = uniform(torch.tensor([[3], [4]]), torch.arange(2)[:, None], torch.arange(20000))
    assert draws.shape == (2, 20000)
    assert abs(float(draws.mean()) - 0.5) < 0.005
    counts = torch.histc(draws[0], bins=20, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 50  # chi-square, 19 degrees of freedom: p < 2e-4
    assert abs(float(torch.corrcoef(draws)[0, 1])) < 0.03
