"""Reference attention: gather a sequence's pages, then torch's own attention.

It runs the CPU quick start, so a sequence is read once and heads of a group share it: query heads are laid out as
[K, H/K, ...] and keys are expanded along the group without a copy. Sequences go one by one: padding them to a common
length would let whatever another sequence left in an unused page (a NaN, say) reach this one through 0 * NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engram_kernels.metadata import PAGE, StepMetadata


def paged_attention(q: Tensor, kv: Tensor, meta: StepMetadata, scale: float) -> Tensor:
    """q [T, H, D] against kv [2, NB, K, PAGE, D], which already holds the step's own keys and values -> [T, H, D].

    Query head h reads key/value head h // (H // K). Causal: a token sees its own position and those before.
    """
    out = torch.empty_like(q)
    start = 0
    for table, query_len, length in zip(meta.block_tables, meta.query_lens_host, meta.seq_lens_host, strict=True):
        tokens = slice(start, start + query_len)
        start += query_len
        out[tokens] = _attend(q[tokens], kv, table[: -(-length // PAGE)], length, scale)
    return out


def _attend(q: Tensor, kv: Tensor, blocks: Tensor, length: int, scale: float) -> Tensor:
    """One sequence: q [n, H, D], the last n of `length` positions."""
    new, heads, dim = q.shape
    kv_heads = kv.shape[2]
    # Selecting along the transposed view writes each head's tokens in a row: one copy, not two.
    pages = kv.transpose(1, 2).index_select(2, blocks)
    keys, values = pages.reshape(2, kv_heads, -1, dim)[:, :, :length].to(q.dtype)
    if new == 1:
        grouped = q.reshape(1, kv_heads, heads // kv_heads, dim)
        attended = F.scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale)
        return attended.reshape(1, heads, dim)
    grouped = q.reshape(new, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    shape = (kv_heads, heads // kv_heads, length, dim)
    mask = None
    if length > new:
        ones = torch.ones(new, length, dtype=torch.bool, device=q.device)
        mask = ones.tril(length - new)
    attended = F.scaled_dot_product_attention(
        grouped,
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return attended.permute(2, 0, 1, 3).reshape(new, heads, dim)
