"""Reference append: scatter the new tokens' keys and values to their slots."""

from __future__ import annotations

from torch import Tensor

from engram_kernels.metadata import PAGE


def kv_append(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Write k and v [T, K, D] into kv [2, NB, K, PAGE, D] in place at slots [T] int64 (block * PAGE + offset).

    Slots of one call are distinct; nothing outside them changes.
    """
    block, offset = slots // PAGE, slots % PAGE
    keys, values = kv
    keys[block, :, offset] = k.to(kv.dtype)
    values[block, :, offset] = v.to(kv.dtype)
