"""Reference of the language-model head."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [R, M] and weight [V, M] of one dtype -> [R, V] fp32, because sampling and log-probabilities need it."""
    return F.linear(hidden, weight).float()
