"""Bias, penalties and suppression, observed through greedy choices; order and neutral values included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_kernels import Ops, SamplingTensors

OPS = Ops.bind("cpu", torch.float32)


def greedy(logits, **columns):
    """Token ids of rows given as nested lists; scalar columns become one value per row."""
    tensor = torch.tensor(logits)
    per_row = {
        name: torch.full((len(logits),), float(value)) if isinstance(value, (int, float)) else value
        for name, value in columns.items()
    }
    return OPS.sample(tensor, SamplingTensors(**per_row)).token_ids.tolist()


def seen(*triples):
    """(row, token, times generated) for each distinct token."""
    rows, ids, counts = zip(*triples, strict=True)
    return torch.tensor(rows), torch.tensor(ids), torch.tensor(counts, dtype=torch.int32)


def pairs(*entries):
    return tuple(torch.tensor(column) for column in zip(*entries, strict=True))


def shape64(row, tokens, bias, repetition, presence, frequency, forbidden):
    """One row in Python: bias, then penalties, then suppression."""
    row = list(row)
    for token, value in bias.items():
        row[token] += value
    for token, count in tokens.items():
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        row[token] -= frequency * count + presence * (count > 0)
    for token in forbidden:
        row[token] = float("-inf")
    return row


halves = st.integers(-6, 6).map(lambda i: i / 2)
tables = st.integers(2, 8).flatmap(
    lambda vocab: st.tuples(
        st.lists(halves, min_size=vocab, max_size=vocab),
        st.dictionaries(st.integers(0, vocab - 1), st.integers(0, 3)),
        st.dictionaries(st.integers(0, vocab - 1), halves),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from([-1.0, 0.0, 0.5]),
        st.sampled_from([-0.5, 0.0, 1.0]),
        st.sets(st.integers(0, vocab - 1), max_size=vocab - 1),
    )
)


@given(row=tables)
def test_any_combination_picks_the_largest_shaped_logit(row):
    logits, tokens, bias, repetition, presence, frequency, forbidden = row
    expected = shape64(*row)
    columns = {
        "repetition_penalty": torch.tensor([repetition]),
        "presence_penalty": torch.tensor([presence]),
        "frequency_penalty": torch.tensor([frequency]),
    }
    if tokens:
        columns["seen"] = seen(*((0, token, count) for token, count in tokens.items()))
    if bias:
        columns["logit_bias"] = pairs(*((0, token, value) for token, value in bias.items()))
    if forbidden:
        columns["suppress"] = pairs(*((0, token) for token in forbidden))
    assert greedy([logits], **columns) == [expected.index(max(expected))]


def test_repetition_penalty_covers_prompt_and_output_and_both_signs():
    prompt_only, generated = (0, 0, 0), (0, 1, 2)
    logits = [[2.0, 1.9, 1.5, -1.0]]
    assert greedy(logits, repetition_penalty=2.0, seen=seen(prompt_only)) == [1]
    assert greedy(logits, repetition_penalty=2.0, seen=seen(prompt_only, generated)) == [2]
    assert greedy([[-1.0, -1.5]], repetition_penalty=2.0, seen=seen((0, 0, 1))) == [1]
    assert greedy([[0.0, -1.5]], repetition_penalty=2.0, seen=seen((0, 0, 1))) == [0]


def test_presence_and_frequency_count_the_output_only():
    logits = [[2.0, 1.8]]
    assert greedy(logits, presence_penalty=1.0, frequency_penalty=1.0, seen=seen((0, 0, 0))) == [0]
    assert greedy(logits, presence_penalty=0.5, seen=seen((0, 0, 1))) == [1]
    assert greedy(logits, presence_penalty=0.1, seen=seen((0, 0, 50))) == [0]
    assert greedy(logits, frequency_penalty=0.15, seen=seen((0, 0, 1))) == [0]
    assert greedy(logits, frequency_penalty=0.15, seen=seen((0, 0, 2))) == [1]


def test_negative_penalties_encourage():
    assert greedy([[1.0, 1.2]], presence_penalty=-0.5, seen=seen((0, 0, 1))) == [0]


def test_penalties_are_per_row():
    logits = [[2.0, 1.9]] * 3
    tokens = seen((0, 0, 1), (1, 0, 1), (2, 0, 1))
    assert greedy(logits, presence_penalty=torch.tensor([0.0, 1.0, 0.0]), seen=tokens) == [0, 1, 0]
    assert greedy(logits, repetition_penalty=torch.tensor([1.0, 1.0, 1.5]), seen=tokens) == [0, 0, 1]
    assert greedy(logits, frequency_penalty=torch.tensor([1.0, 0.0, 0.0]), seen=tokens) == [1, 0, 0]


def test_bias_comes_before_the_repetition_penalty():
    """Biased to 4 then halved to 2 loses to 3; halved first and then biased it would be 3.5 and win."""
    assert greedy([[1.0, 3.0]], logit_bias=pairs((0, 0, 3.0)), repetition_penalty=2.0, seen=seen((0, 0, 1))) == [1]


@pytest.mark.parametrize(("value", "expected"), [(100.0, [2, 0]), (-100.0, [0, 0])])
def test_logit_bias_touches_its_row_only(value, expected):
    assert greedy([[1.0, 0.0, 0.5]] * 2, logit_bias=pairs((0, 2, value))) == expected


def test_a_suppressed_token_cannot_be_biased_back():
    columns = {"suppress": pairs((0, 0)), "logit_bias": pairs((0, 0, 100.0))}
    assert greedy([[5.0, 1.0]], **columns) == [1]


def test_a_suppressed_token_is_never_drawn():
    rows = 500
    s = SamplingTensors(
        temperature=torch.full((rows,), 5.0),
        seeds=torch.arange(rows),
        positions=torch.arange(rows),
        suppress=(torch.arange(rows), torch.zeros(rows, dtype=torch.int64)),
    )
    ids = OPS.sample(torch.tensor([[9.0, 0.0, 0.0]]).expand(rows, -1), s).token_ids
    assert set(ids.tolist()) == {1, 2}


def test_penalties_without_any_seen_token_change_nothing():
    empty = torch.tensor([], dtype=torch.int64)
    logits = torch.tensor([[2.0, 1.0]])
    out = OPS.sample(logits, SamplingTensors(repetition_penalty=torch.tensor([2.0]), seen=(empty, empty, empty)))
    assert out.token_ids.tolist() == [0]
    assert torch.equal(logits, torch.tensor([[2.0, 1.0]]))


def test_shaping_never_changes_the_caller_s_logits():
    logits = torch.tensor([[2.0, 1.0]])
    OPS.sample(logits, SamplingTensors(suppress=pairs((0, 0)), logit_bias=pairs((0, 1, 3.0))))
    assert torch.equal(logits, torch.tensor([[2.0, 1.0]]))
