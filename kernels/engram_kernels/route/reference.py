"""Reference router. Ties go to the lowest expert id, so that every backend picks the same experts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def route(
    router_logits: Tensor, top_k: int, mode: Literal["softmax_topk", "topk_softmax"], renormalize: bool
) -> tuple[Tensor, Tensor]:
    """router_logits [T, E] -> (weights [T, top_k] fp32, expert ids [T, top_k] int64), best first.

    softmax_topk: probabilities over all experts, the chosen ones rescaled to sum to 1 when `renormalize` is set.
    topk_softmax: probabilities over the chosen experts only; they already sum to 1.
    Raises ValueError for another mode or a top_k outside [1, E].
    """
    experts = router_logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and the number of experts {experts}, got {top_k}")
    scores = router_logits.float()
    if mode == "softmax_topk":
        scores = scores.softmax(-1)
    elif mode != "topk_softmax":
        raise ValueError(f"mode must be softmax_topk or topk_softmax, got {mode!r}")
    ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights, ids = ranked[:, :top_k], order[:, :top_k]
    if mode == "topk_softmax":
        weights = weights.softmax(-1)
    elif renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids
