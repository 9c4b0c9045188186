"""Reference gather: the layout in which pieces of the KV cache leave the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram_kernels.metadata import PAGE


def gather_kv(kv_layers: Sequence[Tensor], block_ids: Tensor | Sequence[int], first: int, count: int) -> Tensor:
    """Tokens [first, first + count) of the sequence whose block table is `block_ids` -> [L, 2, K, count, D] contiguous.

    kv_layers: L tensors [2, NB, K, PAGE, D]; block_ids [n] integers. L = 0 gives an empty [0, 2, 0, count, 0] tensor.
    Raises ValueError when the block table does not reach that far.
    """
    if first < 0 or count < 0 or first + count > len(block_ids) * PAGE:
        raise ValueError(f"tokens [{first}, {first + count}) are not in a table of {len(block_ids)} blocks")
    if not kv_layers:
        return torch.empty((0, 2, 0, count, 0))
    keys = kv_layers[0]
    heads, dim = keys.shape[2], keys.shape[4]
    begin, end = first // PAGE, -(-(first + count) // PAGE)
    blocks = torch.as_tensor(block_ids, dtype=torch.int64, device=keys.device)[begin:end]
    start = first - begin * PAGE
    packed = torch.empty((len(kv_layers), 2, heads, count, dim), dtype=keys.dtype, device=keys.device)
    for out, kv in zip(packed, kv_layers, strict=True):
        span = kv[:, blocks].transpose(1, 2).reshape(2, heads, -1, dim)
        out.copy_(span[:, :, start : start + count])
    return packed
