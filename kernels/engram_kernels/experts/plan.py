"""How the experts of a step are computed: pair by pair, by a list per expert or by one sorted list; with which tiles.

A table entry names one of the three for a number of tokens, so where one takes over from another is tuned as well.
Steps that no table lists get the rules below.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engram_kernels.tuning import parameters, tuned, tuned_or_none

SMALL_PAIRS = 256
"""A step of so many pairs goes to `small.py`. Whole steps of Granite-4.0-H-tiny on an H200 with it and with the sorted
list: 32 tokens (192 pairs) 5.21 and 5.81 ms. At 64 tokens it is ahead as well (6.83 and 6.99), but there a few experts
that many tokens choose, as those do that fill a recorded step up, compute their row tiles one after another."""
WIDEST = 8192
"""Wider rows do not fit the registers of `direct.py`."""
MOST_TOKENS = 8192
"""A step of more tokens is computed as one of this many."""


@dataclass(frozen=True, slots=True)
class Direct:
    """`direct.py`: bn columns of gate and up a program, then bn_down outputs; whole rows of weights in registers."""

    bn: int
    bn_down: int
    warps: int


@dataclass(frozen=True, slots=True)
class Small:
    """`small.py`: tiles of bm tokens by bn columns (bn_down in the second product), bk of the inner size a step."""

    bm: int
    bn: int
    bn_down: int
    bk: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class Grouped:
    """The list sorted by expert; fields as those of `Small`."""

    bm: int
    bn: int
    bn_down: int
    bk: int
    stages: int
    warps: int


Choice = Direct | Small | Grouped
KINDS: dict[str, type[Choice]] = {"direct": Direct, "small": Small, "grouped": Grouped}


def key(tokens: int, top: int, count: int, width: int, inner: int, shared: int, dtype: torch.dtype) -> str:
    """Of a step in the table of "experts": tokens (a power of two), experts a token, experts, M, F, S (0: none)."""
    name = str(dtype).removeprefix("torch.")
    return f"tokens={tokens},top={top},experts={count},width={width},inner={inner},shared={shared},dtype={name}"


def parse(entry: Mapping[str, Any], what: str = "an experts tuning entry") -> Choice:
    """The choice that an entry names. ValueError, which begins with `what`, for one that names none."""
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{what}: kind must be {', '.join(KINDS)}, got {kind!r}")
    return parameters(KINDS[kind], entry, what)


def rule(tokens: int, top: int, count: int, width: int) -> Choice:
    """For steps that no table lists: by the number of tokens, of pairs, and of pairs an expert."""
    direct = tuned("experts", {"size": "direct"})
    pairs = tokens * top
    each = pairs / count
    kind: type[Choice] = Grouped
    size = "decode" if each <= 16 else "chunk" if each <= 96 else "prefill"
    if tokens <= direct["tokens"] and width <= WIDEST:
        kind, size = Direct, "direct"
    elif pairs <= SMALL_PAIRS:
        kind, size = Small, "small"
    return parameters(kind, tuned("experts", {"size": size}), f"tuning entry size={size} of experts")


@functools.cache
def plan(tokens: int, top: int, count: int, width: int, inner: int, shared: int, dtype: torch.dtype) -> Choice:
    """How to compute a step (sizes as in `key`): the choice of this GPU's table, or the rules."""
    where = key(min(1 << (tokens - 1).bit_length(), MOST_TOKENS), top, count, width, inner, shared, dtype)
    entry = tuned_or_none("experts", where)
    return rule(tokens, top, count, width) if entry is None else parse(entry, f"tuning entry {where} of experts")
