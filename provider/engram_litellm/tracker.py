"""Where a conversation was left: digest of its history -> conversation id, snapshot, home replica.

The tracker makes nothing correct: without it the server still finds the prefix by token ids. It keeps conversations on
the replica that holds their state and lets a client that names no conversation keep one. So it may forget anything at
any time, and it holds digests and ids only, never message text.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

_K = TypeVar("_K")
CAPACITY = 50_000  # nodes in the process, about 500 bytes each


@dataclass(frozen=True, slots=True)
class Node:
    """What is known after one turn: `turn` orders heads, `home` is the replica's name (a pod's, not an address)."""

    conversation_id: str
    snapshot_id: str | None = None
    home: str | None = None
    turn: int = 0


class Tracker(Protocol):
    """`owner` is the tenant scope of every key; digests are those of `engram_litellm.digests`."""

    def find(self, owner: str, digests: Sequence[bytes]) -> tuple[int, Node] | None:
        """The longest known history: its index in `digests` and its node."""
        ...

    def head(self, owner: str, conversation_id: str) -> Node | None:
        """The newest turn of a conversation."""
        ...

    def record(self, owner: str, digest: bytes, node: Node) -> bool:
        """Remember a turn. True when it became its conversation's head: a late, older turn never moves it back."""
        ...


class LocalTracker:
    """An LRU in this process, safe to use from any thread."""

    def __init__(self, capacity: int = CAPACITY, ttl: float = 86400.0, clock: Callable[[], float] = time.monotonic):
        self._capacity = capacity
        self._ttl = ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: OrderedDict[tuple[str, bytes], tuple[float, Node]] = OrderedDict()
        self._heads: OrderedDict[tuple[str, str], tuple[float, Node]] = OrderedDict()

    def find(self, owner: str, digests: Sequence[bytes]) -> tuple[int, Node] | None:
        with self._lock:
            for index in range(len(digests) - 1, -1, -1):
                node = self._get(self._nodes, (owner, digests[index]))
                if node is not None:
                    return index, node
        return None

    def head(self, owner: str, conversation_id: str) -> Node | None:
        with self._lock:
            return self._get(self._heads, (owner, conversation_id))

    def record(self, owner: str, digest: bytes, node: Node) -> bool:
        with self._lock:
            self._put(self._nodes, (owner, digest), node)
            key = (owner, node.conversation_id)
            current = self._get(self._heads, key)
            if current is not None and current.turn > node.turn:
                return False
            self._put(self._heads, key, node)
            return True

    def __len__(self) -> int:
        return len(self._nodes)

    def _get(self, table: OrderedDict[_K, tuple[float, Node]], key: _K) -> Node | None:
        entry = table.get(key)
        if entry is None:
            return None
        if entry[0] < self._clock():
            del table[key]
            return None
        table[key] = (self._clock() + self._ttl, entry[1])  # sliding, as the snapshots' own age is
        table.move_to_end(key)
        return entry[1]

    def _put(self, table: OrderedDict[_K, tuple[float, Node]], key: _K, node: Node) -> None:
        table[key] = (self._clock() + self._ttl, node)
        table.move_to_end(key)
        while len(table) > self._capacity:
            table.popitem(last=False)
