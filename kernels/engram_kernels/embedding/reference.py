"""Reference embedding lookup."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of the table: ids [T] int64 in [0, V), weight [V, M] -> [T, M]."""
    return F.embedding(ids, weight)
