"""Routing and mixture of experts against their references, with experts nobody chose and ties."""

from __future__ import annotations

import pytest
import torch

from engram_kernels.experts.kernel import experts
from engram_kernels.experts.reference import experts as experts_reference
from engram_kernels.route.kernel import route
from engram_kernels.route.reference import route as route_reference
from tests.support.kernel_cases import relative_error


@pytest.mark.parametrize("mode", ["softmax_topk", "topk_softmax"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route(mode: str, renormalize: bool) -> None:
    logits = torch.randn(7, 12).mul(2).round()  # many ties
    weights, ids = route(logits, 3, mode, renormalize)  # type: ignore[arg-type]
    expected, expected_ids = route_reference(logits, 3, mode, renormalize)  # type: ignore[arg-type]
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights, expected)


def test_route_refuses_what_the_reference_refuses() -> None:
    with pytest.raises(ValueError, match="top_k"):
        route(torch.zeros(1, 4), 5, "softmax_topk", False)
    with pytest.raises(ValueError, match="mode"):
        route(torch.zeros(1, 4), 2, "other", False)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 3, 9, 140, 300])
def test_experts(tokens: int) -> None:
    x = torch.randn(tokens, 40)
    w_in, w_out = torch.randn(6, 48, 40) * 0.2, torch.randn(6, 40, 24) * 0.2
    logits = torch.randn(tokens, 6) + torch.tensor([0, 0, 0, 0, 0, -50.0])
    weights, ids = route_reference(logits, 2, "topk_softmax", True)
    expected = experts_reference(x, w_in, w_out, weights, ids)
    assert relative_error(experts(x, w_in, w_out, weights, ids), expected) < 1e-5
    base = torch.randn(tokens, 40)
    assert relative_error(experts(x, w_in, w_out, weights, ids, base), expected + base) < 1e-5


@pytest.mark.parametrize("again", [[5, 5], [0, 0]])
def test_tokens_without_a_place_may_name_an_expert_twice(again: list[int]) -> None:
    """What fills a recorded step up holds anything: it must not reach the lists of others."""
    x = torch.randn(24, 40)
    w_in, w_out = torch.randn(6, 48, 40) * 0.2, torch.randn(6, 40, 24) * 0.2
    shared = torch.randn(96, 40) * 0.2, torch.randn(40, 48) * 0.2
    weights, ids = route_reference(torch.randn(24, 6), 2, "topk_softmax", True)
    expected = experts_reference(x[:4], w_in, w_out, weights[:4], ids[:4], None, shared)
    ids[4:] = torch.tensor(again)  # 40 pairs of one expert, which has room for 32
    assert relative_error(experts(x, w_in, w_out, weights, ids, None, shared)[:4], expected) < 1e-5


@pytest.mark.parametrize("tokens", [2, 9, 30, 120, 140])
@pytest.mark.parametrize("width", [24, 48, 30])
def test_a_shared_expert_rides_along(tokens: int, width: int) -> None:
    """Its width is one or two of the experts' (folded into their launches) or none (computed before)."""
    x = torch.randn(tokens, 40)
    w_in, w_out = torch.randn(6, 48, 40) * 0.2, torch.randn(6, 40, 24) * 0.2
    shared = torch.randn(2 * width, 40) * 0.2, torch.randn(40, width) * 0.2
    weights, ids = route_reference(torch.randn(tokens, 6), 2, "topk_softmax", True)
    expected = experts_reference(x, w_in, w_out, weights, ids, None, shared)
    assert relative_error(experts(x, w_in, w_out, weights, ids, None, shared), expected) < 1e-5
