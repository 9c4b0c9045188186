"""Bookkeeping of the host memory that preempted sequences live in: a byte budget and who holds how much of it."""

from __future__ import annotations


class SwapLedger:
    """Handles name host buffers in the executor; this side only counts. Engine thread only."""

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._sizes: dict[int, int] = {}
        self._next = 0
        self._drops: list[int] = []

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def handles(self) -> set[int]:
        return set(self._sizes)

    def take(self, size: int) -> int | None:
        """A handle for `size` bytes, or None when the budget is used up."""
        if size > self._left:
            return None
        handle, self._next = self._next, self._next + 1
        self._left -= size
        self._sizes[handle] = size
        return handle

    def give_back(self, handle: int) -> None:
        """The buffer was read back; the executor forgets it by itself."""
        self._left += self._sizes.pop(handle)

    def drop(self, handle: int) -> None:
        """Nobody will read the buffer: the executor is told with the next plan."""
        self.give_back(handle)
        self._drops.append(handle)

    def take_drops(self) -> list[int]:
        drops, self._drops = self._drops, []
        return drops
