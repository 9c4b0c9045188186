"""The checksum of `engram_kernels.checksum.reference` on the GPU: about the rate at which the bytes can be read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram_kernels.checksum.reference import TILE
from engram_kernels.launch import multiprocessors


@triton.jit
def _mixed(value, place):
    """murmur3's finaliser over a tile's sum and place, so that tiles that change places change the digest."""
    value = value.to(tl.uint64) + (tl.cast(place, tl.uint64) + 1) * 0x9E3779B97F4A7C15
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53
    return (value ^ (value >> 33)).to(tl.int64)


@triton.jit(do_not_specialize=["rows", "count", "first_row"])
def _checksum(words, keys, into, rows, count, first_row, TILE: tl.constexpr):
    """words [rows, count]; programs take tiles in turn and add their sums to one word."""
    tiles = tl.cdiv(count, TILE)
    col = tl.arange(0, TILE)
    key = tl.load(keys + col).to(tl.uint64)
    key_low, key_high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    total = tl.zeros((), tl.int64)
    for unit in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = unit // tiles
        at = unit % tiles * TILE + col
        word = tl.load(words + row.to(tl.int64) * count + at, mask=at < count, other=0).to(tl.uint64)
        product = (word.to(tl.uint32) + key_low).to(tl.uint64) * ((word >> 32).to(tl.uint32) + key_high).to(tl.uint64)
        sums = tl.sum(tl.where(at < count, product, 0).to(tl.int64), 0)
        total += _mixed(sums, (first_row + row).to(tl.int64) * tiles + unit % tiles)
    tl.atomic_add(into, total, sem="relaxed")


def checksum(words: Tensor, keys: Tensor, into: Tensor, first_row: int) -> None:
    """As the reference: add the digest of words [rows, n] int64 (contiguous) to into [1] int64."""
    rows, count = words.shape
    if words.dtype != torch.int64 or not words.is_contiguous():
        raise ValueError(f"words must be contiguous int64, got {words.dtype}")
    if not words.numel():
        return
    units = rows * -(-count // TILE)
    _checksum[(min(units, 8 * multiprocessors(words)),)](words, keys, into, rows, count, first_row, TILE, num_warps=8)
