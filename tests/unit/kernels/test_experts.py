"""Routing and expert MLPs against loops in fp64 and transformers' modules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMoE

from engram_kernels import Ops
from tests.unit.kernels.steps import relative_rms

OPS = Ops.bind("cpu", torch.float32)


def route64(row, top_k, mode, renormalize):
    """One token with plain Python: best first, lowest id first among equals."""
    order = sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k]
    scores = torch.tensor(row, dtype=torch.float64)
    weights = scores.softmax(0)[order] if mode == "softmax_topk" else scores[order].softmax(0)
    if renormalize:
        weights = weights / weights.sum()
    return weights, order


@given(
    rows=st.integers(1, 9).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(-3, 3).map(float), min_size=experts, max_size=experts), min_size=1, max_size=5
        )
    ),
    mode=st.sampled_from(["softmax_topk", "topk_softmax"]),
    renormalize=st.booleans(),
    data=st.data(),
)
def test_route_with_many_ties(rows, mode, renormalize, data):
    top_k = data.draw(st.integers(1, len(rows[0])))
    weights, ids = OPS.route(torch.tensor(rows), top_k, mode, renormalize)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    for t, row in enumerate(rows):
        expected, order = route64(row, top_k, mode, renormalize)
        assert ids[t].tolist() == order
        assert torch.allclose(weights[t].double(), expected, atol=1e-6)


def test_bf16_router_logits_are_weighed_in_fp32(ops):
    logits = torch.randn(4, 8).bfloat16()
    weights, _ = ops.route(logits, 3, "softmax_topk", True)
    assert torch.allclose(weights.sum(-1), torch.ones(4), atol=1e-6)
    assert torch.equal(weights, ops.route(logits.float(), 3, "softmax_topk", True)[0])


@pytest.mark.parametrize("top_k", [0, 9])
def test_route_names_a_bad_top_k(ops, top_k):
    with pytest.raises(ValueError, match=f"top_k must be between 1 and the number of experts 8, got {top_k}"):
        ops.route(torch.zeros(1, 8), top_k, "softmax_topk", False)


def test_route_names_a_bad_mode(ops):
    with pytest.raises(ValueError, match="mode must be softmax_topk or topk_softmax, got 'sigmoid'"):
        ops.route(torch.zeros(1, 8), 2, "sigmoid", False)


def experts64(x, w_in, w_out, weights, ids):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t].double(), ids[t].tolist(), strict=True):
            gate, up = (w_in[expert].double() @ x[t].double()).chunk(2)
            out[t] += weight * (w_out[expert].double() @ (gate / (1 + (-gate).exp()) * up))
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("tokens", [1, 13])
def test_experts(ops, dtype, tolerance, tokens):
    x = torch.randn(tokens, 16).to(dtype)
    w_in, w_out = torch.randn(6, 24, 16).to(dtype), torch.randn(6, 16, 12).to(dtype)
    weights, ids = ops.route(torch.randn(tokens, 6), 3, "softmax_topk", True)
    y = ops.experts(x, w_in, w_out, weights, ids)
    assert y.dtype == dtype
    assert relative_rms(y, experts64(x, w_in, w_out, weights, ids)) < tolerance


def test_experts_nobody_chose_are_not_read(ops):
    w_in, w_out = torch.full((4, 8, 6), float("nan")), torch.full((4, 6, 4), float("nan"))
    w_in[2], w_out[2] = torch.randn(8, 6), torch.randn(6, 4)
    x, weights, ids = torch.randn(3, 6), torch.ones(3, 1), torch.full((3, 1), 2)
    assert relative_rms(ops.experts(x, w_in, w_out, weights, ids), experts64(x, w_in, w_out, weights, ids)) < 1e-6


def test_a_step_without_tokens(ops):
    weights, ids = ops.route(torch.zeros(0, 4), 2, "topk_softmax", False)
    assert ops.experts(torch.zeros(0, 6), torch.zeros(4, 8, 6), torch.zeros(4, 6, 4), weights, ids).shape == (0, 6)


def test_routing_and_experts_agree_with_transformers(ops):
    config = GraniteMoeHybridConfig(
        hidden_size=16,
        intermediate_size=12,
        num_local_experts=6,
        num_experts_per_tok=3,
        mamba_n_heads=2,
    )
    block = GraniteMoeHybridMoE(config)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    x = torch.randn(11, 16)
    weights, ids = ops.route(ops.linear(x, block.router.weight), 3, "topk_softmax", False)
    y = ops.experts(x, block.experts.gate_up_proj, block.experts.down_proj, weights, ids)
    assert torch.allclose(y, block(x[None])[0], atol=1e-5)
