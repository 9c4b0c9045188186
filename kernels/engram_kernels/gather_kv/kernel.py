"""KV spans between a sequence's pages and one packed tensor, all layers in one launch, either way.

Snapshots move as packed tensors, because copies of scattered 4 KiB rows reach a few GB/s and one large copy the whole
link. A program moves TOK tokens of one head of one plane (K or V of a layer) as 8-byte words, so any dtype is copied
bit by bit. Layers are separate tensors: their addresses travel as a small table. Measured
on an H200, launch included: Qwen3-8B 16,384 tokens 1.5 ms (75 % of the copy rate), 100 tokens 0.14 ms (host time).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram_kernels.launch import multiprocessors, next_power_of_2
from engram_kernels.metadata import PAGE

TOK = 64


@triton.jit(do_not_specialize=["heads", "begin", "rows", "first", "count", "skip", "total"])
def _move(
    bases, table, packed, heads, begin, rows, first, count, skip, total,
    TOK: tl.constexpr, WORDS: tl.constexpr, WP: tl.constexpr, TO_PACKED: tl.constexpr,
):  # fmt: skip
    """Tokens [first, first + count) of pages [page, heads, 16, WORDS], packed [rows, total, WORDS] from `skip` on."""
    tiles = tl.cdiv(count, TOK)
    col = tl.arange(0, WP)
    row = tl.arange(0, TOK)
    for unit in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        line = unit // tiles
        plane_head = begin + line
        token = unit % tiles * TOK + row
        keep = (token < count)[:, None] & (col[None, :] < WORDS)
        base = tl.load(bases + plane_head // heads).to(tl.pointer_type(tl.int64))
        base = tl.multiple_of(base, 16)
        position = first + token
        page = tl.load(table + position // 16, mask=token < count, other=0).to(tl.int64)
        paged = base + ((page * heads + plane_head % heads) * 16 + position % 16)[:, None] * WORDS + col[None, :]
        flat = packed + (line.to(tl.int64) * total + skip + token)[:, None] * WORDS + col[None, :]
        if TO_PACKED:
            tl.store(flat, tl.load(paged, mask=keep, other=0), mask=keep)
        else:
            tl.store(paged, tl.load(flat, mask=keep, other=0), mask=keep)


def plane_addresses(kv_layers: Sequence[Tensor]) -> Tensor:
    """Addresses of the planes (K, then V, of each layer) [2 * L] int64 on their device."""
    # Arithmetic instead of views: with 36 layers the views cost more than the copy of a short turn.
    half = kv_layers[0].stride(0) * kv_layers[0].element_size()
    planes = [kv.data_ptr() + plane for kv in kv_layers for plane in (0, half)]
    return torch.tensor(planes, dtype=torch.int64).to(kv_layers[0].device, non_blocking=True)


def move_rows(
    packed: Tensor,
    bases: Tensor,
    table: Tensor,
    heads: int,
    begin: int,
    first: int,
    count: int,
    skip: int,
    *,
    to_packed: bool,
) -> None:
    """Copy tokens [first, first + count) between pages and packed [rows, total, D], at its tokens from `skip` on.

    Row r is head (begin + r) % heads of plane (begin + r) // heads; bases as `plane_addresses`, table [n] int32: the
    sequence's blocks. Raises ValueError when a row of D elements is no multiple of 8 bytes.
    """
    rows, total, dim = packed.shape
    row_bytes = dim * packed.element_size()
    if row_bytes % 8:
        raise ValueError(f"head_dim times element size must be a multiple of 8 bytes, got {row_bytes}")
    if not rows or not count:
        return
    words = row_bytes // 8
    _move[(min(rows * -(-count // TOK), 8 * multiprocessors(packed)),)](
        bases, table, packed.view(torch.int64), heads, begin, rows, first, count, skip, total,
        TOK, words, next_power_of_2(words), to_packed, num_warps=8,
    )  # fmt: skip


def move_kv(
    packed: Tensor, kv_layers: Sequence[Tensor], block_ids: Tensor | Sequence[int], first: int, *, to_packed: bool
) -> None:
    """Copy tokens [first, first + count) between the layers' pages and packed [L, 2, K, count, D] on their device.

    Raises ValueError when a row of D elements is no multiple of 8 bytes.
    """
    layers, _, heads, count, dim = packed.shape
    if not packed.numel():
        return
    table = torch.as_tensor(block_ids, dtype=torch.int32, device=packed.device)
    rows = packed.view(2 * layers * heads, count, dim)
    move_rows(rows, plane_addresses(kv_layers), table, heads, 0, first, count, 0, to_packed=to_packed)


def gather_kv(kv_layers: Sequence[Tensor], block_ids: Tensor | Sequence[int], first: int, count: int) -> Tensor:
    """As the reference: tokens [first, first + count) of the block table -> [L, 2, K, count, D] contiguous."""
    if first < 0 or count < 0 or first + count > len(block_ids) * PAGE:
        raise ValueError(f"tokens [{first}, {first + count}) are not in a table of {len(block_ids)} blocks")
    if not kv_layers:
        return torch.empty((0, 2, 0, count, 0))
    some = kv_layers[0]
    shape = (len(kv_layers), 2, some.shape[2], count, some.shape[4])
    packed = torch.empty(shape, dtype=some.dtype, device=some.device)
    move_kv(packed, kv_layers, block_ids, first, to_packed=True)
    return packed
