"""Launch parameters of the attention kernels: those that this GPU's table lists for a shape, or the rules below."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from engram_kernels.launch import next_power_of_2
from engram_kernels.tuning import parameters, tuned, tuned_or_none

SPLIT, PREFILL = "paged_attention.split_kv", "paged_attention.prefill"
MOST_TOKENS = 8192
"""Chunks of more tokens together are tiled as this many are."""


@dataclass(frozen=True, slots=True)
class Split:
    """Of `split_kv`: tiles of `keys`; about `waves` programs a multiprocessor, into whose pieces the keys are cut;
    `merge` pieces put together at a time."""

    keys: int
    stages: int
    warps: int
    waves: int
    merge: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Of `prefill`: `queries` by `keys`; ahead: the next tile's scores start before this tile's softmax."""

    queries: int
    keys: int
    stages: int
    warps: int
    ahead: bool


def chunk_block(heads: int, kv_heads: int) -> int:
    """Tokens of a short chunk that `split_kv` gives to a program (1 is its decode form: one token a sequence)."""
    return max(2, 64 * kv_heads // heads)


def split_key(sequences: int, block: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> str:
    """In the table of "paged_attention.split_kv": a power of two sequences, `block` tokens to a program."""
    return f"sequences={sequences},block={block},{_heads(heads, kv_heads, dim, dtype)}"


def prefill_key(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> str:
    """In the table of "paged_attention.prefill": a power of two new tokens of all chunks together."""
    return f"tokens={tokens},{_heads(heads, kv_heads, dim, dtype)}"


def _heads(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> str:
    return f"heads={heads},kv_heads={kv_heads},dim={dim},dtype={str(dtype).removeprefix('torch.')}"


@functools.cache
def split_plan(sequences: int, block: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Split:
    """For decodes (block 1) or short chunks."""
    key = split_key(next_power_of_2(sequences), block, heads, kv_heads, dim, dtype)
    entry = tuned_or_none(SPLIT, key)
    if entry is not None:
        return parameters(Split, entry, f"tuning entry {key} of {SPLIT}")
    rows = max(16, next_power_of_2(block * heads // kv_heads))
    shape: dict[str, int | str] = {"size": _size(sequences * kv_heads), "rows": min(rows, 64)}
    entry = tuned(SPLIT, {"dtype": "float32"} if dtype == torch.float32 else shape)
    return parameters(Split, entry, f"tuning entry of {SPLIT}")


def _size(pairs: int) -> str:
    """A word for the number of (sequence, KV head) pairs: how much there is to read without splitting."""
    return "tiny" if pairs <= 32 else "small" if pairs <= 256 else "medium" if pairs <= 512 else "large"


@functools.cache
def prefill_plan(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tile:
    """For chunks of `tokens` new tokens together."""
    key = prefill_key(min(next_power_of_2(tokens), MOST_TOKENS), heads, kv_heads, dim, dtype)
    entry = tuned_or_none(PREFILL, key)
    if entry is not None:
        return parameters(Tile, entry, f"tuning entry {key} of {PREFILL}")
    width = "float32" if dtype == torch.float32 else "half"
    padded = max(16, next_power_of_2(dim))
    entry = tuned(PREFILL, {"dtype": width, "dim": min(max(padded, 64), 256)})
    return parameters(Tile, entry, f"tuning entry of {PREFILL}")
