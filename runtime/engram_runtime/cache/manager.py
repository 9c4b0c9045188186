"""The cache as the scheduler sees it: blocks and states to compute in, prefixes to start from, leases to keep alive."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from engram_runtime.cache.pool import Pool, as_slots
from engram_runtime.cache.prefix_index import Match, PrefixIndex, Spot
from engram_runtime.cache.runs import Run, as_tokens


class Chain:
    """How far one sequence's tokens are registered; remembers the last full block so that growing is O(1)."""

    __slots__ = ("spot", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.spot: Spot | None = None


class Lease:
    """Keeps blocks and a state slot alive for somebody outside the scheduler. `release` twice is harmless."""

    __slots__ = ("_cache", "block_ids", "released", "state_slot")

    def __init__(self, cache: CacheManager, block_ids: array[int], state_slot: int | None) -> None:
        self._cache = cache
        self.block_ids = block_ids
        self.state_slot = state_slot
        self.released = False

    def release(self) -> None:
        """Engine thread only."""
        if self.released:
            return
        self.released = True
        self._cache.forget_lease(self)
        self._cache.release_blocks(self.block_ids)
        if self.state_slot is not None:
            self._cache.states.release((self.state_slot,))


REMEMBERED_LOOKUPS = 64
"""A request is looked up when it comes and when it is admitted, often with nothing changed in between; with 64k tokens
that is a third of a millisecond each time."""


class CacheManager:
    """Block pool, state pool and prefix index under one roof. Not thread-safe: the engine thread owns it.

    `num_states` is 0 for models without recurrent state; then every common prefix is usable.
    """

    def __init__(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self.block_size = block_size
        self.index = PrefixIndex(block_size, num_blocks)
        self.blocks = Pool(num_blocks, self.index.evict_blocks)
        self.states = Pool(num_states, self.index.evict_states)
        self.index.attach(self.blocks, self.states)
        self.has_state = num_states > 0
        self._leases: set[Lease] = set()
        self._looked_up: dict[int, tuple[array[int], str, int, Match]] = {}
        """By the identity of the tokens, which are kept, so that it stays theirs."""
        self._looked_up_at = 0
        """The index's count of changes when these were true."""

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, tenant: str, tokens: Sequence[int], limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens. An array of tokens is not changed by anybody later."""
        if not isinstance(tokens, array):
            return self.index.match(tenant, tokens, limit, self.has_state)
        if self._looked_up_at != self.index.changes or len(self._looked_up) >= REMEMBERED_LOOKUPS:
            self._looked_up.clear()
            self._looked_up_at = self.index.changes
        known = self._looked_up.get(id(tokens))
        if known is not None and known[1:3] == (tenant, limit):
            return known[3]
        match = self.index.match(tenant, tokens, limit, self.has_state)
        self._looked_up[id(tokens)] = (tokens, tenant, limit, match)
        return match

    def release_blocks(self, block_ids: Sequence[int]) -> None:
        """Of one chain: the tail first, so that it is evicted before the head it depends on."""
        self.blocks.release(as_slots(block_ids)[::-1])

    def lease(self, block_ids: Sequence[int], state_slot: int | None = None) -> Lease:
        """One more reference to each until the lease is released."""
        held = array("i", block_ids)
        self.blocks.acquire(held)
        if state_slot is not None:
            self.states.acquire((state_slot,))
        return self._remember(Lease(self, held, state_slot))

    def adopt(self, block_ids: Sequence[int], state_slot: int | None = None) -> Lease:
        """A lease that takes over references the caller already has."""
        return self._remember(Lease(self, array("i", block_ids), state_slot))

    def _remember(self, lease: Lease) -> Lease:
        self._leases.add(lease)
        return lease

    def forget_lease(self, lease: Lease) -> None:
        self._leases.discard(lease)

    def register(
        self, chain: Chain, tokens: Sequence[int], block_ids: Sequence[int], upto: int, *, partial: bool = False
    ) -> Spot | None:
        """As `register_from`, of a sequence whose tokens are at hand."""
        known = as_tokens(tokens)
        return self.register_from(chain, lambda first, last: known[first:last], block_ids, upto, partial=partial)

    def register_from(
        self,
        chain: Chain,
        tokens: Callable[[int, int], array[int]],
        block_ids: Sequence[int],
        upto: int,
        *,
        partial: bool = False,
    ) -> Spot | None:
        """Make tokens [0, upto) findable; with `partial` also those that do not fill their block.

        tokens(first, last): array("I") of those positions; asked for what is not registered yet. Returns the last
        registered block (None when there is none). The contents must have been computed.
        """
        size, index = self.block_size, self.index
        known = None if chain.spot is None else index.find(chain.spot)
        run, passed = index.root(chain.tenant), 0
        if known is not None and (known[0].start + known[1] + 1) * size <= upto:
            run, passed = known[0], known[1] + 1
        else:
            chain.spot = None
        begin, end = run.start + passed, upto if partial else upto // size * size
        if begin * size < end:
            added = as_slots(block_ids)[begin : self.blocks_for(end)]
            run, at = index.insert(run, passed, tokens(begin * size, end), added)
            chain.spot = index.spot(run, at - (end % size > 0))
            return index.spot(run, at)
        return chain.spot

    def record(self, spot: Spot, position: int, state_slot: int | None, mark: Any = None) -> None:
        """Attach what was captured at `position` (inside the block). The caller keeps its reference to the slot."""
        run = self._run(spot)
        if state_slot is not None:
            self.index.put_state(run, position, state_slot)
        if mark is not None:
            self.index.put_mark(run, position, mark)

    def thin_states(self, spot: Spot, before: int) -> None:
        """The chain of `spot` has a newer state to go on from: its states below `before` are evicted first."""
        if self.has_state:
            self.index.demote_states(self._run(spot), before)

    def mark_at(self, spot: Spot, position: int) -> Any:
        """The boundary recorded at exactly `position`, or None."""
        return self._run(spot).marks.get(position)

    def _run(self, spot: Spot) -> Run:
        found = self.index.find(spot)
        if found is None:
            raise RuntimeError(f"block {spot.block} was evicted since it was registered")
        return found[0]

    def check_integrity(self, blocks: Counter[int], states: Counter[int]) -> None:
        """Raise AssertionError unless the given holders plus the leases account for every reference."""
        blocks, states = Counter(blocks), Counter(states)
        for lease in self._leases:
            blocks.update(lease.block_ids)
            if lease.state_slot is not None:
                states[lease.state_slot] += 1
        self.index.check()
        self.blocks.check(blocks)
        self.states.check(states)
