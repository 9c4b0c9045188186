"""The way back of `engram_kernels.gather_kv.kernel`: a packed span into the pages of a sequence, all layers at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engram_kernels.gather_kv.kernel import move_kv
from engram_kernels.metadata import PAGE


def scatter_kv(packed: Tensor, kv_layers: Sequence[Tensor], block_ids: Tensor | Sequence[int], first: int) -> None:
    """As the reference: packed [L, 2, K, count, D], also on the host, becomes tokens [first, first + count)."""
    count = packed.shape[3]
    if len(kv_layers) != packed.shape[0]:
        raise ValueError(f"packed holds {packed.shape[0]} layers, the cache has {len(kv_layers)}")
    if first < 0 or first + count > len(block_ids) * PAGE:
        raise ValueError(f"tokens [{first}, {first + count}) are not in a table of {len(block_ids)} blocks")
    if not kv_layers:
        return
    some = kv_layers[0]
    there = packed.to(device=some.device, dtype=some.dtype, non_blocking=True).contiguous()
    move_kv(there, kv_layers, block_ids, first, to_packed=False)
