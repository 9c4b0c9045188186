"""Choosing a token: greedy, temperature, cuts, reproducibility, and log-probabilities of the raw logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_kernels import Ops, SamplingTensors
from engram_kernels.sample.philox import uniform

OPS = Ops.bind("cpu", torch.float32)
DRAWS = 4000


def settings_for(rows, *, temperature=1.0, seed=7, positions=None, **columns):
    """Per-row tensors from scalars or lists."""

    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    dtypes = {"top_k": torch.int64}
    return SamplingTensors(
        temperature=column(temperature, torch.float32),
        seeds=column(seed, torch.int64),
        positions=torch.arange(rows) if positions is None else torch.tensor(positions),
        **{name: column(value, dtypes.get(name, torch.float32)) for name, value in columns.items()},
    )


def draw_many(row, **options):
    """Counts of each token over many positions of one sequence: row [V] -> [V]."""
    logits = row.expand(DRAWS, -1)
    ids = OPS.sample(logits, settings_for(DRAWS, **options)).token_ids
    return torch.bincount(ids, minlength=row.shape[0]).double()


def chi_square(counts, probabilities):
    used = probabilities > 0
    assert counts[~used].sum() == 0
    expected = probabilities[used] * counts.sum()
    return float(((counts[used] - expected) ** 2 / expected).sum())


def cut64(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution to sample from, token by token in Python; equal logits share one fate."""
    vocab = len(row)
    top = max(row)
    weight = [math.exp((x - top) / temperature) for x in row]
    alive = set(range(vocab))
    if 0 < top_k < vocab:
        bar = sorted(row, reverse=True)[top_k - 1]
        alive = {i for i in alive if row[i] >= bar}
    if top_p < 1:
        total = sum(weight[i] for i in alive)
        mass, bar = 0.0, top
        for i in sorted(alive, key=lambda i: -row[i]):
            if mass >= top_p * total:
                break
            mass, bar = mass + weight[i], row[i]
        alive = {i for i in alive if row[i] >= bar}
    if min_p > 0:
        alive = {i for i in alive if weight[i] >= min_p}
    total = sum(weight[i] for i in alive)
    return torch.tensor([weight[i] / total if i in alive else 0.0 for i in range(vocab)], dtype=torch.float64)


ROW = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.0, 2.5, 0.9, -0.4, 1.7, 0.6])

# Critical values of chi-square at p = 1e-4; the seed is fixed, so a pass stays a pass.
LIMIT = {9: 33.7, 8: 31.8, 7: 29.9, 6: 27.9, 5: 25.7, 4: 23.5, 3: 21.1, 2: 18.4, 1: 15.1, 0: 0.0}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
    ],
)
def test_draws_follow_the_distribution(options):
    expected = cut64(ROW.tolist(), **options)
    assert chi_square(draw_many(ROW, **options), expected) <= LIMIT[int((expected > 0).sum()) - 1]


def test_different_seeds_draw_independently():
    logits = ROW.expand(DRAWS, -1)
    ids = OPS.sample(logits, settings_for(DRAWS, seed=list(range(DRAWS)), positions=[5] * DRAWS)).token_ids
    counts = torch.bincount(ids, minlength=10).double()
    assert chi_square(counts, cut64(ROW.tolist())) < LIMIT[9]


def test_two_seeds_give_different_sequences_and_one_seed_the_same():
    logits = ROW.expand(50, -1)
    first, again, other = (OPS.sample(logits, settings_for(50, seed=s)).token_ids for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@given(
    row=st.lists(st.integers(-4, 4).map(lambda i: i / 2), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_no_draw_leaves_the_cut(row, top_k, top_p, min_p, temperature):
    """Small integer logits: ties everywhere, top_k beyond the vocabulary, every cut at once."""
    expected = cut64(row, temperature, top_k, top_p, min_p)
    logits = torch.tensor(row).expand(200, -1)
    s = settings_for(200, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids = OPS.sample(logits, s).token_ids
    assert bool((expected[ids] > 0).all())
    likely = torch.nonzero(expected > 0.2).flatten().tolist()
    assert set(likely) <= set(ids.tolist())


def test_tokens_that_tie_at_the_cut_are_all_kept():
    row = torch.tensor([2.0, 1.0, 1.0, 1.0, -5.0])
    for options in ({"top_k": 2}, {"top_p": 0.6}):
        counts = draw_many(row, **options)
        assert bool((counts[:4] > 0).all())
        assert counts[4] == 0


@pytest.mark.parametrize("options", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": 10}, {"top_k": 11}, {"min_p": 0.0}])
def test_neutral_settings_change_no_draw(options):
    logits = ROW.expand(300, -1)
    plain = OPS.sample(logits, settings_for(300)).token_ids
    assert torch.equal(OPS.sample(logits, settings_for(300, **options)).token_ids, plain)


def test_top_p_of_one_keeps_a_token_far_out_in_the_tail_even_beside_rows_that_cut():
    row = torch.cat((torch.zeros(1), torch.linspace(-18.0, -21.0, 5000)))
    logits = row.expand(200, -1)
    s = settings_for(200, temperature=3.0, top_p=[1.0] * 199 + [0.05])
    plain = OPS.sample(logits, settings_for(200, temperature=3.0)).token_ids
    assert bool((plain > 2000).any())
    assert torch.equal(OPS.sample(logits, s).token_ids[:-1], plain[:-1])


def test_a_flat_distribution_wider_than_the_first_look_is_cut_exactly():
    """Top-p first looks at a prefix of the sorted vocabulary; a flat row needs more than that."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(5000, generator=generator) * 0.01
    expected = cut64(row.tolist(), top_p=0.9)
    ids = OPS.sample(row.expand(500, -1), settings_for(500, top_p=0.9)).token_ids
    assert bool((expected[ids] > 0).all())
    order = row.argsort(descending=True)
    kept = int((expected > 0).sum())
    assert 4000 < kept < 5000
    assert set(ids.tolist()) & set(order[kept // 2 : kept].tolist()), "the lower half of the nucleus is reachable"


def test_temperature_zero_is_argmax_and_the_lowest_id_wins_a_tie():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [-1.0, -2.0, 5.0]])
    for s in (SamplingTensors(), settings_for(3, temperature=0.0, top_k=2, top_p=0.5)):
        assert OPS.sample(logits, s).token_ids.tolist() == [1, 0, 2]


def test_greedy_and_sampled_rows_share_a_batch():
    logits = ROW.expand(40, -1)
    mixed = OPS.sample(logits, settings_for(40, temperature=[0.0, 1.0] * 20)).token_ids
    plain = OPS.sample(logits, settings_for(40)).token_ids
    assert mixed[0::2].tolist() == [5] * 20
    assert torch.equal(mixed[1::2], plain[1::2])


@given(order=st.permutations(range(12)), taken=st.integers(1, 12))
def test_a_token_does_not_depend_on_batch_or_order(order, taken):
    torch.manual_seed(1)
    logits = torch.randn(12, 50)
    seeds, positions = [s * 1000 + 3 for s in range(12)], list(range(12))
    temperature = [0.0, 0.5, 1.0] * 4
    columns = {"top_k": [0, 5, 50, 3] * 3, "top_p": [1.0, 0.8, 0.9] * 4, "min_p": [0.0, 0.1] * 6}
    full = OPS.sample(
        logits, settings_for(12, temperature=temperature, seed=seeds, positions=positions, **columns)
    ).token_ids
    some = order[:taken]
    alone = OPS.sample(
        logits[some],
        settings_for(
            taken,
            temperature=[temperature[i] for i in some],
            seed=[seeds[i] for i in some],
            positions=[positions[i] for i in some],
            **{name: [values[i] for i in some] for name, values in columns.items()},
        ),
    ).token_ids
    assert alone.tolist() == full[some].tolist()


def test_the_draw_is_the_gumbel_argmax_of_the_addressed_uniforms():
    logits = torch.randn(6, 100)
    s = settings_for(6, seed=[3, -4, 5, 2**40, 7, 8], positions=[0, 1, 2, 3, 100000, 5], temperature=0.8)
    noise = -torch.log(-torch.log(uniform(s.seeds[:, None], s.positions[:, None], torch.arange(100)).double()))
    expected = (logits.double() / 0.8 + noise).argmax(-1)
    assert torch.equal(OPS.sample(logits, s).token_ids, expected)


def test_a_tiny_temperature_does_not_overflow():
    logits = torch.tensor([[1e4, 2e4, 3e4]])
    assert OPS.sample(logits, settings_for(1, temperature=1e-38)).token_ids.tolist() == [2]


def test_a_temperature_needs_seeds_and_positions():
    with pytest.raises(ValueError, match="seeds and positions are needed when a temperature is given"):
        OPS.sample(torch.zeros(1, 4), SamplingTensors(temperature=torch.ones(1)))


@pytest.mark.parametrize("wanted", [0, 1, 5, 10, 20])
def test_logprobs_are_of_the_raw_logits(wanted):
    torch.manual_seed(2)
    logits = torch.randn(8, 10) * 3
    before = logits.clone()
    s = settings_for(8, temperature=0.3, top_k=2, repetition_penalty=1.5)
    shaped = SamplingTensors(
        temperature=s.temperature,
        seeds=s.seeds,
        positions=s.positions,
        top_k=s.top_k,
        repetition_penalty=s.repetition_penalty,
        seen=(torch.tensor([0, 1]), torch.tensor([3, 3]), torch.tensor([1, 0])),
        logit_bias=(torch.tensor([2]), torch.tensor([4]), torch.tensor([50.0])),
        num_logprobs=wanted,
    )
    out = OPS.sample(logits, shaped)
    raw = before.double().log_softmax(-1)
    assert torch.equal(logits, before)
    assert out.token_ids[2] == 4
    assert torch.allclose(out.logprobs.double(), raw.gather(-1, out.token_ids[:, None])[:, 0], atol=1e-5)
    if wanted == 0:
        assert out.top_logprobs is None
        assert out.top_ids is None
        return
    width = min(wanted, 10)
    assert out.top_ids.shape == out.top_logprobs.shape == (8, width)
    assert torch.allclose(out.top_logprobs.double(), raw.topk(width).values, atol=1e-5)
    assert torch.allclose(out.top_logprobs.double(), raw.gather(-1, out.top_ids), atol=1e-5)


def test_no_rows_is_no_tokens():
    out = OPS.sample(torch.zeros(0, 5), settings_for(0))
    assert out.token_ids.shape == out.logprobs.shape == (0,)
