"""Reference scatter: the inverse of `gather_kv`, used when a restored piece enters the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram_kernels.metadata import PAGE


def scatter_kv(packed: Tensor, kv_layers: Sequence[Tensor], block_ids: Tensor | Sequence[int], first: int) -> None:
    """Write packed [L, 2, K, count, D] in place as tokens [first, first + count) of the sequence with this block table.

    kv_layers: L tensors [2, NB, K, PAGE, D]; packed may be on the host. Tokens outside the span are not touched, also
    those of a block that the span covers in part. Raises ValueError when the table is too short or L differs.
    """
    count = packed.shape[3]
    if len(kv_layers) != packed.shape[0]:
        raise ValueError(f"packed holds {packed.shape[0]} layers, the cache has {len(kv_layers)}")
    if first < 0 or first + count > len(block_ids) * PAGE:
        raise ValueError(f"tokens [{first}, {first + count}) are not in a table of {len(block_ids)} blocks")
    if not kv_layers:
        return
    device = kv_layers[0].device
    position = torch.arange(first, first + count, device=device)
    block = torch.as_tensor(block_ids, dtype=torch.int64, device=device)[position // PAGE]
    offset = position % PAGE
    for values, kv in zip(packed.to(device), kv_layers, strict=True):
        kv[:, block, :, offset] = values.permute(2, 0, 1, 3).to(kv.dtype)
