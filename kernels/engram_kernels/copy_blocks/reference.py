"""Reference block copy, the write half of copy-on-write when sequences share a block."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy blocks src [n] to dst [n] (int64, dst distinct) of kv [2, NB, K, PAGE, D] in place.

    All sources are read before any destination is written.
    """
    kv[:, dst] = kv[:, src]
