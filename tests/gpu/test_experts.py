"""Routing and mixture of experts on the GPU at the shapes of Granite-4.0-H-tiny and Qwen3-30B-A3B."""

from __future__ import annotations

import pytest
import torch

from engram_kernels.experts.kernel import experts
from engram_kernels.experts.reference import experts as experts_reference
from engram_kernels.route.kernel import route
from engram_kernels.route.reference import route as route_reference
from tests.support.kernel_cases import relative_error

BF16 = torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 64, 3000])
@pytest.mark.parametrize(("count", "top"), [(64, 6), (128, 8), (72, 10)])
@pytest.mark.parametrize("mode", ["softmax_topk", "topk_softmax"])
def test_route(tokens: int, count: int, top: int, mode: str) -> None:
    logits = torch.randn(tokens, count, device="cuda").to(BF16)  # bf16: many ties
    weights, ids = route(logits, top, mode, True)  # type: ignore[arg-type]
    expected, expected_ids = route_reference(logits, top, mode, True)  # type: ignore[arg-type]
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 3, 8, 64, 300, 2000])
@pytest.mark.parametrize(("count", "width", "inner", "top"), [(64, 1536, 512, 6), (128, 2048, 768, 8), (8, 96, 80, 2)])
def test_experts(tokens: int, count: int, width: int, inner: int, top: int) -> None:
    x = torch.randn(tokens, width, device="cuda").to(BF16)
    w_in = (torch.randn(count, 2 * inner, width, device="cuda") * 0.03).to(BF16)
    w_out = (torch.randn(count, width, inner, device="cuda") * 0.03).to(BF16)
    skew = torch.linspace(2, -2, count, device="cuda")  # some experts get many tokens, some none
    weights, ids = route_reference(torch.randn(tokens, count, device="cuda") + skew, top, "softmax_topk", True)
    expected = torch.zeros(tokens, width, device="cuda")
    for expert in range(count):
        token, choice = torch.where(ids == expert)
        gate, up = (x[token].float() @ w_in[expert].float().t()).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        expected.index_add_(0, token, hidden @ w_out[expert].float().t() * weights[token, choice, None])
    assert relative_error(experts(x, w_in, w_out, weights, ids), expected) < 6e-3
    base = torch.randn(tokens, width, device="cuda").to(BF16)
    assert relative_error(experts(x, w_in, w_out, weights, ids, base), expected + base.float()) < 6e-3


@pytest.mark.parametrize("tokens", [1, 8, 9, 32, 64, 128, 200])
def test_a_shared_expert_rides_along(tokens: int) -> None:
    count, width, inner, top = 64, 1536, 512, 6
    x = torch.randn(tokens, width, device="cuda").to(BF16)
    w_in = (torch.randn(count, 2 * inner, width, device="cuda") * 0.03).to(BF16)
    w_out = (torch.randn(count, width, inner, device="cuda") * 0.03).to(BF16)
    s_in = (torch.randn(4 * inner, width, device="cuda") * 0.03).to(BF16)
    s_out = (torch.randn(width, 2 * inner, device="cuda") * 0.03).to(BF16)
    weights, ids = route_reference(torch.randn(tokens, count, device="cuda"), top, "softmax_topk", True)
    wide = [t.float() for t in (x, w_in, w_out)]
    expected = experts_reference(*wide, weights, ids, None, (s_in.float(), s_out.float()))
    assert relative_error(experts(x, w_in, w_out, weights, ids, None, (s_in, s_out)), expected) < 6e-3


def test_experts_capture_into_a_graph() -> None:
    x = torch.randn(4, 256, device="cuda").to(BF16)
    w_in, w_out = (torch.randn(*s, device="cuda").to(BF16) * 0.1 for s in ((16, 128, 256), (16, 256, 64)))
    logits = torch.randn(4, 16, device="cuda")
    weights, ids = route(logits, 2, "softmax_topk", True)
    experts(x, w_in, w_out, weights, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = route(logits, 2, "softmax_topk", True)
        out = experts(x, w_in, w_out, weights, ids)
    for _ in range(3):
        logits.normal_()
        graph.replay()
        assert torch.equal(out, experts(x, w_in, w_out, *route(logits, 2, "softmax_topk", True)))
