"""Reference block copy, the write half of copy-on-write when sequences share a block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_blocks(kv_layers: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy blocks src [n] to dst [n] (int64, dst distinct) of every layer's kv [2, NB, K, PAGE, D] in place.

    All sources are read before any destination is written.
    """
    for kv in kv_layers:
        kv[:, dst] = kv[:, src]
