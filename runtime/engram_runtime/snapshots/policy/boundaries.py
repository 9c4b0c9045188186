"""The boundaries of a turn, in the order in which a turn reaches them."""

from __future__ import annotations

from engram_runtime.snapshots.types import BOUNDARY_KINDS

_RANK = {kind: rank for rank, kind in enumerate(BOUNDARY_KINDS)}


def check_boundary(kind: str) -> str:
    """ValueError unless `kind` is a known boundary."""
    if kind not in _RANK:
        raise ValueError(f"boundary must be one of {', '.join(BOUNDARY_KINDS)}, got {kind!r}")
    return kind


def rank(kind: str) -> int:
    """Later boundaries of one turn have a higher rank."""
    return _RANK[kind]
