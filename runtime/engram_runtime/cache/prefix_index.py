"""Which tokens are already in the cache: a tree of runs of blocks per tenant, states and boundary marks at exact
positions.

Runs are found by comparing tokens, not by a hash of them, so two prefixes can never be taken for one another; tenants
have separate roots, so one can never find the other's blocks. A block with fewer tokens than it has room for ends its
chain until its owner fills it.

Dense models may use any common prefix, down to a single token of a block (the block is copied before it is written).
Recurrent states cannot be cut: a model that has them can only go on from a position where a state was kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from engram_runtime.cache.pool import Pool, slots_view
from engram_runtime.cache.runs import Run, as_tokens, common, tokens_view


def _no_blocks() -> array[int]:
    return array("i")


class Spot(NamedTuple):
    """The end of a registered block, to be gone on from. `serial` tells whether the block was registered anew since."""

    block: int
    serial: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix.

    `position` tokens need not be computed: `blocks` (array("i")) hold them, all but the last in full; if `position` is
    not a multiple of the block size the last of `blocks` has to be copied before it is written. `state` is the
    checkpoint slot exact at `position`. The longest common prefix may be longer than what is usable: `whole` are its
    complete blocks, `marks` the boundaries on it, deepest first, as (position, mark).
    """

    position: int = 0
    blocks: array[int] = field(default_factory=_no_blocks)
    state: int | None = None
    whole: array[int] = field(default_factory=_no_blocks)
    marks: tuple[tuple[int, Any], ...] = ()
    spot: Spot | None = field(default=None, compare=False)
    """Of the last complete block within `position`: where registering goes on."""


class PrefixIndex:
    """The tree, kept in step with the two pools. Not thread-safe: the engine thread owns it."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self._roots: dict[str, Run] = {}
        self._runs: dict[int, Run] = {}
        self._made = 0
        self._registered = 0
        self.changes = 0
        """Goes up with everything that may change what a lookup finds."""
        # Of each block: its run (-1: none), how many blocks lie above it, when it was registered.
        self._owner = np.full(num_blocks, -1, dtype=np.int64)
        self._depth = np.zeros(num_blocks, dtype=np.int64)
        self._serial = np.zeros(num_blocks, dtype=np.int64)
        self._state_places: dict[int, tuple[Run, int]] = {}
        self._blocks: Pool | None = None
        self._states: Pool | None = None

    def attach(self, blocks: Pool, states: Pool) -> None:
        """The pools whose slots this index refers to; they call `evict_blocks` and `evict_states`."""
        self._blocks, self._states = blocks, states

    def root(self, tenant: str) -> Run:
        root = self._roots.get(tenant)
        if root is None:
            root = self._roots[tenant] = Run(-1, None, 0, array("I"), array("i"))
        return root

    def __len__(self) -> int:
        """Blocks that can be found."""
        return sum(len(run.blocks) for run in self._runs.values())

    def find(self, spot: Spot) -> tuple[Run, int] | None:
        """The run that holds the spot's block, and its place there; None once it was evicted."""
        number = int(self._owner[spot.block])
        if number < 0 or self._serial[spot.block] != spot.serial:
            return None
        run = self._runs[number]
        return run, int(self._depth[spot.block]) - run.start

    def spot(self, run: Run, at: int) -> Spot | None:
        """Of block `at` of a run; of the one above the run for -1."""
        if at < 0:
            above = run.parent
            if above is None or not above.blocks:
                return None
            run, at = above, len(above.blocks) - 1
        block = run.blocks[at]
        return Spot(block, int(self._serial[block]))

    # Looking up

    def match(self, tenant: str, tokens: Sequence[int], limit: int, needs_state: bool) -> Match:
        """The longest usable prefix of at most `limit` tokens."""
        wanted = tokens_view(as_tokens(tokens))[:limit]
        path, found = self._walk(self.root(tenant), wanted)
        if not path:
            return Match()
        size = self.block_size
        marks = tuple(self._marks(path, wanted, found))
        position, state = found, None
        if needs_state:
            position, state = self._deepest_state(path, wanted, found)
        blocks = array("i", b"".join(run.blocks.tobytes() for run in path))
        used, complete = -(-position // size), position // size
        spot = None
        if complete:
            last = blocks[complete - 1]
            spot = Spot(last, int(self._serial[last]))
        return Match(position, blocks[:used], state, blocks[: found // size], marks, spot)

    def _walk(self, run: Run, wanted: np.ndarray) -> tuple[list[Run], int]:
        """Runs along `wanted`, the last one possibly in part, and the number of common tokens."""
        size = self.block_size
        path: list[Run] = []
        position = 0
        while position < len(wanted):
            rest = wanted[position:]
            child = run.children.get(rest[:size].tobytes())
            if child is None:
                best, length = None, 0
                for one in run.by_first.get(int(rest[0]), ()):
                    shared = common(tokens_view(one.tokens[:size]), rest)
                    if shared > length:
                        best, length = one, shared
                if best is not None:
                    path.append(best)
                return path, position + length
            path.append(child)
            shared = common(tokens_view(child.tokens), rest)
            position += shared
            if shared < len(child.tokens) or shared % size:
                break
            run = child
        return path, position

    def _alike(self, run: Run, wanted: np.ndarray) -> Iterator[tuple[Run, int]]:
        """Runs beside `run` that begin like it, with the position up to which they are `wanted`.

        Where two chains part inside a block, what was recorded before that point may be filed under either.
        """
        size = self.block_size
        first = run.start * size
        for sibling in run.parent.by_first[run.tokens[0]] if run.parent is not None else ():
            if sibling is not run:
                yield sibling, first + common(tokens_view(sibling.tokens[:size]), wanted[first:])

    def _deepest_state(self, path: list[Run], wanted: np.ndarray, found: int) -> tuple[int, int | None]:
        for run in reversed(path):
            places = [(position, slot) for position, slot in run.states.items() if position <= found]
            for sibling, end in self._alike(run, wanted):
                places += [(position, slot) for position, slot in sibling.states.items() if position <= end]
            if places:
                return max(places)
        return 0, None

    def _marks(self, path: list[Run], wanted: np.ndarray, found: int) -> Iterator[tuple[int, Any]]:
        last = path[-1]
        marks = {position: mark for position, mark in last.marks.items() if position <= found}
        if found <= (last.start + 1) * self.block_size:
            for sibling, end in self._alike(last, wanted):
                for position, mark in sibling.marks.items():
                    if position <= end:
                        marks.setdefault(position, mark)
        for run in reversed(path):
            here = marks if run is last else run.marks
            for position in sorted(here, reverse=True):
                yield position, here[position]

    # Recording

    def insert(self, run: Run, passed: int, tokens: array[int], blocks: array[int]) -> tuple[Run, int]:
        """Add `tokens` (one at least), whose contents `blocks` hold, behind the first `passed` blocks of `run`.

        Where other blocks already cover these tokens, those stay and the given ones remain private to their owner.
        Returns where the last block is now: a run and the place in it.
        """
        self.changes += 1
        size, view = self.block_size, tokens_view(tokens)
        done = 0
        while True:
            rest = view[done * size :]
            if passed == len(run.blocks):
                child = run.children.get(rest[:size].tobytes())
                if child is None and len(rest) < size:
                    alike = run.by_first.get(int(rest[0]), ())
                    child = next((c for c in alike if common(tokens_view(c.tokens), rest) == len(rest)), None)
                if child is None:
                    return self._append(run, tokens[done * size :], blocks[done:])
                run, passed = child, 0
            own = tokens_view(run.tokens[passed * size :])
            shared = common(own, rest)
            if shared == len(rest):
                return run, passed + (shared - 1) // size
            whole = shared // size
            passed, done = passed + whole, done + whole
            if passed == len(run.blocks):
                continue
            if shared == len(own):
                return self._complete(run, passed, tokens[done * size :], blocks[done:])
            self._split(run, passed)

    def _append(self, run: Run, tokens: array[int], blocks: array[int]) -> tuple[Run, int]:
        """New blocks where a run ends."""
        size, alike = self.block_size, run.by_first.get(tokens[0], ())
        shorter = [c for c in alike if len(c.tokens) < size and c.tokens == tokens[: len(c.tokens)]]
        if shorter:
            mine = next((c for c in shorter if c.blocks[0] == blocks[0]), shorter[0])
            for other in shorter:
                if other is not mine:
                    self._absorb(other, mine)
            return self._complete(mine, 0, tokens, blocks)
        self._make_private(blocks)
        if run.parent is not None and not run.children:
            begin = len(run.blocks)
            run.tokens.extend(tokens)
            run.blocks.extend(blocks)
            return self._map(run, begin)
        child = self._make(run, run.start + len(run.blocks), tokens, blocks)
        run.link(child, size)
        return self._map(child, 0)

    def _complete(self, run: Run, at: int, tokens: array[int], blocks: array[int]) -> tuple[Run, int]:
        """`tokens` begin with all that block `at`, the run's last one, holds, and go on: they take its place."""
        size, parent, before = self.block_size, run.parent, run.blocks[at]
        if at == 0 and parent is not None:
            parent.unlink(run, size)
        self._unmap(run.blocks[at:])
        if before != blocks[0]:
            self._pool(self._blocks).uncache((before,))
        self._make_private(blocks)
        del run.tokens[at * size :], run.blocks[at:]
        run.tokens.extend(tokens)
        run.blocks.extend(blocks)
        if at == 0 and parent is not None:
            parent.link(run, size)
        return self._map(run, at)

    def _absorb(self, shorter: Run, longer: Run) -> None:
        """`longer` is going to cover all of `shorter`, a single block: one is enough."""
        for position, slot in list(shorter.states.items()):
            if position in longer.states:
                self.drop_state(slot)
            else:
                longer.states[position] = slot
                self._state_places[slot] = (longer, position)
        shorter.states.clear()
        for position, mark in shorter.marks.items():
            longer.marks.setdefault(position, mark)
        self._cut(shorter, 0)

    def _split(self, run: Run, at: int) -> None:
        """Another chain leaves before block `at`: what is behind becomes a run of its own."""
        size = self.block_size
        tail = self._make(run, run.start + at, run.tokens[at * size :], run.blocks[at:])
        tail.children, tail.by_first = run.children, run.by_first
        for child in tail.children.values():
            child.parent = tail
        border = tail.start * size
        for position in [position for position in run.states if position > border]:
            tail.states[position] = slot = run.states.pop(position)
            self._state_places[slot] = (tail, position)
        for position in [position for position in run.marks if position > border]:
            tail.marks[position] = run.marks.pop(position)
        del run.tokens[at * size :], run.blocks[at:]
        run.children, run.by_first = {}, {}
        run.link(tail, size)
        self._owner[slots_view(tail.blocks)] = tail.number

    def _make(self, parent: Run, start: int, tokens: array[int], blocks: array[int]) -> Run:
        self._made += 1
        run = self._runs[self._made] = Run(self._made, parent, start, tokens, blocks)
        return run

    def _map(self, run: Run, begin: int) -> tuple[Run, int]:
        """The blocks of a run from `begin` on are found from now on."""
        added = run.blocks[begin:]
        self._registered += 1
        if len(added) == 1:  # of a decode, every sixteenth step: an array costs ten times as much as its one element
            block = added[0]
            self._owner[block], self._depth[block] = run.number, run.start + begin
            self._serial[block] = self._registered
            self._pool(self._blocks).cache(added)
            return run, begin
        chosen = slots_view(added)
        self._owner[chosen] = run.number
        self._depth[chosen] = np.arange(run.start + begin, run.start + len(run.blocks))
        self._serial[chosen] = self._registered
        self._pool(self._blocks).cache(added)
        return run, len(run.blocks) - 1

    def _unmap(self, blocks: array[int]) -> None:
        self._owner[slots_view(blocks)] = -1

    def _make_private(self, blocks: array[int]) -> None:
        """A block that was reused without being evicted first cannot be found by its old tokens any more."""
        if len(blocks) == 1 and self._owner[blocks[0]] < 0:
            return
        for block in slots_view(blocks)[self._owner[slots_view(blocks)] >= 0].tolist():
            number = int(self._owner[block])
            if number >= 0:  # not gone with one before it
                self._cut(self._runs[number], int(self._depth[block]) - self._runs[number].start)

    # States and marks

    def put_state(self, run: Run, position: int, slot: int) -> bool:
        """Keep `slot` as the state at `position`, inside `run`; False when one is already kept there."""
        if position in run.states:
            return False
        self.changes += 1
        run.states[position] = slot
        self._state_places[slot] = (run, position)
        self._pool(self._states).cache((slot,))
        return True

    def put_mark(self, run: Run, position: int, mark: Any) -> None:
        """What a lookup that comes past `position`, inside `run`, is told; in place of what was there."""
        self.changes += 1
        run.marks[position] = mark

    def demote_states(self, last: Run | None, before: int) -> None:
        """Let the states of this chain at positions below `before` go first when slots are needed."""
        pool, run = self._pool(self._states), last
        while run is not None:
            for position in sorted(run.states, reverse=True):
                if position < before:
                    pool.demote(run.states[position])
            run = run.parent

    def drop_state(self, slot: int) -> None:
        self.changes += 1
        run, position = self._state_places.pop(slot)
        del run.states[position]
        self._pool(self._states).uncache((slot,))

    # Forgetting

    def evict_blocks(self, blocks: array[int]) -> int:
        """The pool reuses the first few of `blocks`, and is told how many: nothing below them can be reached any more.

        More than one at a time where they are the end of one run: released last block first, evicted in that order.
        """
        self.changes += 1
        run = self._runs[int(self._owner[blocks[0]])]
        at = int(self._depth[blocks[0]]) - run.start
        count = 1
        if len(blocks) > 1 and at == len(run.blocks) - 1 and not run.children:
            count = common(slots_view(run.blocks)[::-1], slots_view(blocks))
        self._cut(run, at - count + 1)
        return count

    def evict_states(self, slots: array[int]) -> int:
        """The pool reuses the first of `slots`."""
        self.changes += 1
        run, position = self._state_places.pop(slots[0])
        del run.states[position]
        return 1

    def _cut(self, run: Run, at: int) -> None:
        """Forget the blocks of a run from `at` on, and all that hangs below."""
        border = (run.start + at) * self.block_size
        gone = run.blocks[at:]
        states = [slot for position, slot in run.states.items() if position > border]
        below = list(run.children.values())
        if at:
            del run.tokens[at * self.block_size :], run.blocks[at:]
            run.children, run.by_first = {}, {}
            run.marks = {position: mark for position, mark in run.marks.items() if position <= border}
        else:
            if run.parent is not None:
                run.parent.unlink(run, self.block_size)
            del self._runs[run.number]
        while below:
            lower = below.pop()
            below.extend(lower.children.values())
            gone.extend(lower.blocks)
            states.extend(lower.states.values())
            del self._runs[lower.number]
        for slot in states:
            self.drop_state(slot)
        self._unmap(gone)
        self._pool(self._blocks).uncache(gone)

    @staticmethod
    def _pool(pool: Pool | None) -> Pool:
        if pool is None:
            raise RuntimeError("attach() gives the index its pools before it is used")
        return pool

    def check(self) -> None:
        """Raise AssertionError unless the tree is consistent."""
        size, seen, states = self.block_size, dict[int, tuple[int, int]](), set[int]()
        stack, runs = list(self._roots.values()), 0
        while stack:
            run = stack.pop()
            assert sum(len(v) for v in run.by_first.values()) == len(run.children)
            for key, child in run.children.items():
                runs += 1
                assert child.tokens[:size].tobytes() == key, "a run is filed under other tokens"
                assert child.parent is run, "a run has another parent"
                assert child.start == run.start + len(run.blocks), "a run is at the wrong depth"
                assert child in run.by_first[child.tokens[0]], "a run is missing from the first-token table"
                assert child.blocks, "a run is empty"
                assert len(child.blocks) == -(-len(child.tokens) // size), "a run has too many blocks or too few"
                assert len(child.tokens) % size == 0 or not child.children, "a partial block has children"
                assert self._runs.get(child.number) is child, "a run is not known by its number"
                for at, block in enumerate(child.blocks):
                    assert block not in seen, "two runs share a block"
                    seen[block] = (child.number, child.start + at)
                first, end = child.start * size, child.start * size + len(child.tokens)
                assert all(first < position <= end for position in child.marks), "a mark lies outside its run"
                for position, slot in child.states.items():
                    assert first < position <= end, "a state lies outside its run"
                    assert self._state_places[slot] == (child, position), "a state is filed elsewhere"
                    assert slot not in states, "two positions share a state slot"
                    states.add(slot)
                stack.append(child)
        assert runs == len(self._runs), "a run cannot be reached"
        places = zip(self._owner.tolist(), self._depth.tolist(), strict=True)
        owned = {block: place for block, place in enumerate(places) if place[0] >= 0}
        assert seen == owned, "a block is not where it is said to be"
        assert states == set(self._state_places), "a state cannot be reached"


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix of two prompts."""
    if not left or not right or left[0] != right[0]:
        return 0
    return common(tokens_view(as_tokens(left)), tokens_view(as_tokens(right)))
