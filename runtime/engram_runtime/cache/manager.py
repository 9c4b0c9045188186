"""The cache as the scheduler sees it: blocks and states to compute in, prefixes to start from, leases to keep alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from engram_runtime.cache.pool import Pool
from engram_runtime.cache.prefix_index import Match, Node, PrefixIndex


class Chain:
    """How far one sequence's tokens are registered; remembers the last full node so that growing is O(1)."""

    __slots__ = ("node", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.node: Node | None = None


class Lease:
    """Keeps blocks and a state slot alive for somebody outside the scheduler. `release` twice is harmless."""

    __slots__ = ("_cache", "block_ids", "released", "state_slot")

    def __init__(self, cache: CacheManager, block_ids: tuple[int, ...], state_slot: int | None) -> None:
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


class CacheManager:
    """Block pool, state pool and prefix index under one roof. Not thread-safe: the engine thread owns it.

    `num_states` is 0 for models without recurrent state; then every common prefix is usable.
    """

    def __init__(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self.block_size = block_size
        self.index = PrefixIndex(block_size)
        self.blocks = Pool(num_blocks, self.index.evict_block)
        self.states = Pool(num_states, self.index.evict_state)
        self.index.attach(self.blocks, self.states)
        self.has_state = num_states > 0
        self._leases: set[Lease] = set()

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, tenant: str, tokens: Sequence[int], limit: int) -> Match:
        return self.index.match(tenant, tokens, limit, self.has_state)

    def release_blocks(self, block_ids: Sequence[int]) -> None:
        """The tail first, so that it is evicted before the head it depends on."""
        self.blocks.release(reversed(block_ids))

    def lease(self, block_ids: Iterable[int], state_slot: int | None = None) -> Lease:
        """One more reference to each until the lease is released."""
        held = tuple(block_ids)
        self.blocks.acquire(held)
        if state_slot is not None:
            self.states.acquire((state_slot,))
        return self._remember(Lease(self, held, state_slot))

    def adopt(self, block_ids: Iterable[int], state_slot: int | None = None) -> Lease:
        """A lease that takes over references the caller already has."""
        return self._remember(Lease(self, tuple(block_ids), state_slot))

    def _remember(self, lease: Lease) -> Lease:
        self._leases.add(lease)
        return lease

    def forget_lease(self, lease: Lease) -> None:
        self._leases.discard(lease)

    def register(
        self, chain: Chain, tokens: Sequence[int], block_ids: Sequence[int], upto: int, *, partial: bool = False
    ) -> Node | None:
        """Make tokens [0, upto) findable; with `partial` also those that do not fill their block.

        Returns the node of the last registered block (None when there is none). The contents must have been computed.
        """
        size = self.block_size
        node = chain.node if chain.node is not None and self.index.is_attached(chain.node) else None
        if node is None or (node.depth + 1) * size > upto:
            node = self.index.root(chain.tenant)
        for depth in range(node.depth + 1, upto // size):
            node = self.index.insert(node, tuple(tokens[depth * size : (depth + 1) * size]), block_ids[depth])
        chain.node = node
        tail = upto % size
        if partial and tail:
            return self.index.insert(node, tuple(tokens[upto - tail : upto]), block_ids[upto // size])
        return node if node.depth >= 0 else None

    def record(self, node: Node, position: int, state_slot: int | None, mark: Any = None) -> None:
        """Attach what was captured at `position` (inside `node`). The caller keeps its reference to the slot."""
        offset = position - node.depth * self.block_size
        if state_slot is not None:
            self.index.put_state(node, offset, state_slot)
        if mark is not None:
            node.marks[offset] = mark

    def thin_states(self, node: Node, before: int) -> None:
        """The chain of `node` has a newer state to go on from: its states below `before` are evicted first."""
        if self.has_state:
            self.index.demote_states(node, before)

    def mark_at(self, node: Node, position: int) -> Any:
        """The boundary recorded at exactly `position`, or None."""
        return node.marks.get(position - node.depth * self.block_size)

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
