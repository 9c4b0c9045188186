"""The sampling kernels against the reference on a real vocabulary, and against the distribution they should draw."""

from __future__ import annotations

import pytest
import torch

from engram_kernels.metadata import SamplingTensors
from engram_kernels.sample.kernel import sample
from engram_kernels.sample.reference import sample as reference

VOCAB = 151936


def _tensors(rows: int, **fields: object) -> SamplingTensors:
    generator = torch.Generator().manual_seed(rows)
    temperature = torch.rand(rows, generator=generator) * 1.5
    temperature[::5] = 0.0
    return SamplingTensors(
        temperature=temperature.cuda(),
        seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator).cuda(),
        positions=torch.randint(0, 2**20, (rows,), generator=generator).cuda(),
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("cuts", ["none", "top_k", "top_p", "all"])
def test_tokens_equal_the_reference(rows: int, cuts: str) -> None:
    logits = torch.randn(rows, VOCAB, device="cuda") * 4
    fields: dict[str, object] = {}
    if cuts in ("top_k", "all"):
        fields["top_k"] = torch.randint(0, 200, (rows,), device="cuda")
    if cuts in ("top_p", "all"):
        fields["top_p"] = torch.rand(rows, device="cuda") * 0.9 + 0.1
    if cuts == "all":
        fields["min_p"] = torch.rand(rows, device="cuda") * 0.05
    s = _tensors(rows, num_logprobs=5, **fields)
    got, expected = sample(logits, s), reference(logits, s)
    # A sum in another order may move a cut by one token, so one row in 64 may differ.
    assert int((got.token_ids != expected.token_ids).sum()) <= rows // 64
    same = got.token_ids == expected.token_ids
    torch.testing.assert_close(got.logprobs[same], expected.logprobs[same], rtol=1e-4, atol=1e-4)
    assert got.top_logprobs is not None
    torch.testing.assert_close(got.top_logprobs, expected.top_logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spread", [0.3, 0.64, 1.3])
def test_flat_rows_are_cut_where_the_reference_cuts_them(spread: float) -> None:
    """Top-p keeps tens of thousands of tokens here, as a model with random weights has them."""
    rows = 32
    logits = torch.randn(rows, VOCAB, device="cuda") * spread
    s = SamplingTensors(
        temperature=torch.full((rows,), 0.8, device="cuda"),
        seeds=torch.arange(rows, device="cuda"),
        positions=torch.arange(rows, device="cuda") * 5,
        top_p=torch.linspace(0.3, 0.99, rows, device="cuda"),
    )
    same = sample(logits, s).token_ids == reference(logits, s).token_ids
    assert int((~same).sum()) <= 1  # a sum in another order may move a cut by one token


@pytest.mark.parametrize("top_p", [0.9999999, 0.999999])
def test_a_top_p_close_to_one_keeps_nearly_everything(top_p: float) -> None:
    rows = 32
    logits = torch.randn(rows, VOCAB, device="cuda") * 3
    s = SamplingTensors(
        temperature=torch.ones(rows, device="cuda"),
        seeds=torch.arange(rows, device="cuda"),
        positions=torch.arange(rows, device="cuda"),
        top_p=torch.full((rows,), top_p, device="cuda"),
    )
    assert sample(logits, s).token_ids.tolist() == reference(logits, s).token_ids.tolist()


def test_draws_follow_the_distribution() -> None:
    rows = 20000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -20.0], device="cuda").expand(rows, -1).contiguous()
    s = SamplingTensors(
        temperature=torch.full((rows,), 0.8, device="cuda"),
        seeds=torch.arange(rows, device="cuda"),
        positions=torch.zeros(rows, dtype=torch.int64, device="cuda"),
    )
    counts = sample(logits, s).token_ids.bincount(minlength=6).double()
    expected = (logits[0].double() / 0.8).softmax(-1) * rows
    assert ((counts - expected).abs() < 5 * expected.sqrt() + 1).all()


def test_sampling_captures_into_a_graph() -> None:
    logits = torch.randn(8, VOCAB, device="cuda")
    s = _tensors(8, top_k=torch.full((8,), 50, device="cuda"), top_p=torch.full((8,), 0.9, device="cuda"))
    sample(logits, s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(logits, s)
    for _ in range(3):
        logits.normal_(std=3.0)
        graph.replay()
        assert out.token_ids.tolist() == sample(logits, s).token_ids.tolist()
