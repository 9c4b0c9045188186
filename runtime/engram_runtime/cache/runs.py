"""What the prefix index is made of: runs of blocks, and tokens that are compared by the thousand.

A conversation of 64k tokens is one run, not four thousand nodes: looking it up, registering it and giving it back are
then a few operations on whole arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np


def as_tokens(tokens: Sequence[int]) -> array[int]:
    """As array("I"); itself if it is one. OverflowError, TypeError for what is no token id."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)


def tokens_view(tokens: array[int]) -> np.ndarray:
    """[n] uint32, sharing memory; let it go before the array is made longer or shorter."""
    return np.frombuffer(tokens, dtype=np.uint32) if tokens else np.empty(0, dtype=np.uint32)


def common(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the longest common prefix of two integer arrays."""
    length = min(len(left), len(right))
    if length == 0 or left[0] != right[0]:
        return 0
    differs = left[:length] != right[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


class Run:
    """Blocks one after another that no other chain leaves in between; its children begin where it ends.

    All but the last block are full; one whose last block is not has no children. `states` (slots) and `marks` are keyed
    by absolute position, which lies above the run's first token.
    """

    __slots__ = ("blocks", "by_first", "children", "marks", "number", "parent", "start", "states", "tokens")

    def __init__(self, number: int, parent: Run | None, start: int, tokens: array[int], blocks: array[int]) -> None:
        self.number = number
        self.parent = parent
        self.start = start
        """Blocks above this run: its first token's position is start * block_size."""
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, Run] = {}
        """By the tokens of their first block."""
        self.by_first: dict[int, list[Run]] = {}
        """By their first token."""
        self.states: dict[int, int] = {}
        self.marks: dict[int, Any] = {}

    def link(self, child: Run, size: int) -> None:
        """Make `child` findable below this run."""
        self.children[child.tokens[:size].tobytes()] = child
        self.by_first.setdefault(child.tokens[0], []).append(child)

    def unlink(self, child: Run, size: int) -> None:
        del self.children[child.tokens[:size].tobytes()]
        beside = self.by_first[child.tokens[0]]
        beside.remove(child)
        if not beside:
            del self.by_first[child.tokens[0]]
