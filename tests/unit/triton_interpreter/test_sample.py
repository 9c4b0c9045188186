"""The sampling kernels choose the reference's tokens: same random stream, same cuts, same log-probabilities."""

from __future__ import annotations

import pytest
import torch

from engram_kernels.metadata import SamplingTensors
from engram_kernels.sample import cut, kernel
from engram_kernels.sample.reference import _floor
from engram_kernels.sample.reference import sample as reference

ROWS, VOCAB = 4, 120


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK", 64)
    monkeypatch.setattr(cut, "CAP", 64)  # some rows fit, some have to be read whole


def _tensors(**fields: object) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 1e-4, 2.0]),
        seeds=torch.tensor([1, 2, -3, 2**40 + 5]),
        positions=torch.tensor([0, 7, 7, 2**20]),
        **fields,
    )


CUTS = {
    "none": {},
    "top_k": {"top_k": torch.tensor([3, 1, 0, 5])},
    "top_p": {"top_p": torch.tensor([0.5, 0.9, 0.1, 0.999])},
    "min_p": {"min_p": torch.tensor([0.0, 0.1, 0.5, 1.0])},
    "all": {
        "top_k": torch.tensor([0, 20, 0, 50]),
        "top_p": torch.tensor([0.5, 0.9, 0.3, 1.0]),
        "min_p": torch.tensor([0.0, 0.01, 0.0, 0.05]),
    },
}


@pytest.mark.parametrize(("name", "ties"), [*((name, False) for name in CUTS), ("all", True)])
def test_tokens_equal_the_reference(name: str, ties: bool) -> None:
    logits = torch.randn(ROWS, VOCAB) * 3
    if ties:
        logits = logits.round()
    s = _tensors(**CUTS[name], num_logprobs=3)
    got, expected = kernel.sample(logits, s), reference(logits, s)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(got.logprobs, expected.logprobs)
    assert got.top_logprobs is not None
    torch.testing.assert_close(got.top_logprobs, expected.top_logprobs)


@pytest.mark.parametrize("cap", [16, 64])
@pytest.mark.parametrize("spread", [0.05, 0.8, 6.0])
def test_a_flat_row_is_cut_where_the_reference_cuts_it(
    spread: float, cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut lies among more logits than `solve` holds: in a slice of a level or, of equal logits, nowhere less."""
    monkeypatch.setattr(cut, "CAP", cap)
    s = SamplingTensors(
        temperature=torch.full((ROWS,), 0.9),
        seeds=torch.arange(ROWS),
        positions=torch.arange(ROWS) * 7,
        top_p=torch.tensor([0.9, 0.6, 0.97, 0.8]),
    )
    for _ in range(2):  # other logits, so also another cut, each time
        logits = torch.randn(ROWS, VOCAB) * spread
        logits[3] = logits[3].round()
        s.positions.add_(1)  # type: ignore[union-attr]
        got, expected = kernel.sample(logits, s), reference(logits, s)
        assert got.token_ids.tolist() == expected.token_ids.tolist()


def _kept(logits: torch.Tensor, top_p: list[float]) -> tuple[list[int], list[int]]:
    """How many tokens of each row survive top-p in the kernels and in the reference; temperature 1."""
    rows, vocab = logits.shape
    chunks = torch.nn.functional.pad(logits, (0, -vocab % kernel.CHUNK), value=-torch.inf).unflatten(
        -1, (-1, kernel.CHUNK)
    )
    ones, p = torch.ones(rows), torch.tensor(top_p)
    found = kernel._find_cuts(logits, chunks.amax(-1), ones, None, p)
    assert found is not None
    scaled = logits - logits.amax(-1, keepdim=True)
    s = SamplingTensors(ones, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64), top_p=p)
    floor = _floor(scaled, torch.arange(rows), s)
    assert floor is not None
    inside = scaled.abs().view(torch.int32) <= found[:, None]
    return inside.sum(-1).tolist(), (scaled >= floor[:, None]).sum(-1).tolist()


def test_a_top_p_that_rounding_may_not_reach_cuts_next_to_nothing() -> None:
    """Not everything but the best token: sums of the vocabulary in another order fall short of it."""
    got, expected = _kept(torch.randn(8, 300) * 3, [0.99999994, 0.9999999] * 4)
    assert all(abs(one - other) < 20 for one, other in zip(got, expected, strict=True))


def test_a_cut_at_the_end_of_a_slice_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row asks for the mass of one slice and those above it, within a rounding of its sum."""
    monkeypatch.setattr(cut, "CAP", 16)
    row = torch.randn(219, generator=torch.Generator().manual_seed(3)) * 0.3
    scaled = row - row.max()
    edges = torch.arange(1, 65) / 32  # slices of the levels that end at 0.5, 1, 1.5 and 2
    mass = torch.stack([scaled.double().exp()[scaled >= -edge].sum() for edge in edges])
    shares = (mass / scaled.double().exp().sum()).float()
    shares = shares[(shares > 0.2) & (shares < 0.99)].unique()[4::5]
    top_p = [float(s) for share in shares for s in (share, torch.nextafter(share, torch.tensor(1.0)))]
    got, expected = _kept(row.expand(len(top_p), -1).contiguous(), top_p)
    assert len(top_p) == 10
    assert all(abs(one - other) <= 1 for one, other in zip(got, expected, strict=True))


def test_the_only_survivor_is_chosen_whatever_its_noise() -> None:
    """The word of this seed, position and id is the one that maps to a uniform number of 0."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 56] = 10.0
    s = SamplingTensors(torch.ones(1), torch.tensor([0]), torch.tensor([21765996]), top_k=torch.tensor([1]))
    assert kernel.sample(logits, s).token_ids.tolist() == reference(logits, s).token_ids.tolist() == [56]


def test_a_row_of_nothing_gives_the_reference_s_token() -> None:
    s = SamplingTensors(torch.ones(2), torch.tensor([1, 2]), torch.tensor([3, 4]))
    logits = torch.full((2, VOCAB), -torch.inf)
    assert kernel.sample(logits, s).token_ids.tolist() == reference(logits, s).token_ids.tolist() == [0, 0]


def test_penalties_bias_and_suppression() -> None:
    logits = torch.randn(ROWS, VOCAB)
    before = logits.clone()
    rows, ids = torch.tensor([0, 0, 1, 3]), torch.tensor([4, 9, 4, 100])
    s = _tensors(
        seen=(rows, ids, torch.tensor([2, 0, 1, 3])),
        repetition_penalty=torch.full((ROWS,), 1.5),
        frequency_penalty=torch.full((ROWS,), 0.3),
        presence_penalty=torch.full((ROWS,), 0.2),
        logit_bias=(torch.tensor([0, 2, 3]), torch.tensor([4, 7, 8]), torch.tensor([9.0, 50.0, -3.0])),
        suppress=(torch.tensor([2, 3]), torch.tensor([7, 0])),
    )
    got, expected = kernel.sample(logits, s), reference(logits, s)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(got.logprobs, expected.logprobs)
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [70, 110]] = 1.0
    got = kernel.sample(logits, SamplingTensors())
    assert got.token_ids.tolist() == [70, 0]
    torch.testing.assert_close(got.logprobs, logits.log_softmax(-1)[[0, 1], got.token_ids])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_numbers_still_give_tokens(temperature: float) -> None:
    logits = torch.full((2, 5000), torch.nan)
    logits[1, :4000] = 0.0
    s = SamplingTensors(torch.full((2,), temperature), torch.tensor([1, 2]), torch.tensor([3, 4]))
    tokens = kernel.sample(logits, s).token_ids
    assert ((tokens >= 0) & (tokens < 5000)).all()


def test_a_temperature_needs_seeds() -> None:
    with pytest.raises(ValueError, match="seeds"):
        kernel.sample(torch.zeros(1, 8), SamplingTensors(temperature=torch.ones(1)))
