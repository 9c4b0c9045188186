"""What a sequence needs to start: the longest cached prefix, blocks for the rest, a state slot; all or nothing."""

from __future__ import annotations

from array import array
from dataclasses import replace

from engram_runtime.cache.manager import CacheManager
from engram_runtime.cache.prefix_index import Match
from engram_runtime.engine.sequence import Sequence
from engram_runtime.engine.step import Draft
from engram_runtime.executor.plan import Copy, Swap
from engram_runtime.snapshots.policy.cost import is_close_above


class Admission:
    """Takes memory for sequences; leaves nothing taken when it says no. Engine thread only."""

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.prefix_hit_tokens = 0

    def start(self, draft: Draft, sequence: Sequence, reserve: int) -> bool:
        """Memory for a new (or restarted) sequence; `reserve` blocks are to stay available for those who decode."""
        if self.cache.blocks.available <= reserve and not sequence.background:
            return False  # looking for a prefix costs time, and there is not even room for one block
        # One prompt token is always left to forward, since its logits start the output. A background sequence samples
        # nothing and may find everything.
        limit = sequence.total if sequence.background else sequence.total - 1
        match = Match()
        if sequence.use_prefix:
            tokens = sequence.prompt_ids if limit <= len(sequence.prompt_ids) else sequence.token_ids(0, limit)
            match = self.cache.match(sequence.tenant, tokens, limit)
        arriving = sequence.arriving
        if arriving is not None and arriving.match.position > match.position:
            marks = {**dict(match.marks), **dict(arriving.match.marks)}
            whole = replace(arriving.match, marks=tuple(sorted(marks.items(), reverse=True)))
            if not self._start_from(draft, sequence, whole, reserve, owned=True):
                return False
            draft.after = arriving.ticket
            return True
        sequence.arriving = None  # by now the GPU has as much
        if sequence.background and match.position == sequence.total:
            self._hold_all(sequence, match)
            return True
        if self._start_from(draft, sequence, match, reserve):
            return True
        # A block used in part is copied, so for a moment the prefix costs one block more than the sequence needs.
        # Where nobody else holds memory that must not keep it waiting for ever.
        return reserve == 0 and match.position > 0 and self._start_from(draft, sequence, Match(), reserve)

    def _start_from(self, draft: Draft, sequence: Sequence, match: Match, reserve: int, *, owned: bool = False) -> bool:
        """owned: a block that is full in part need not be copied, since nobody else goes on writing in it."""
        cache, size = self.cache, self.cache.block_size
        whole = len(match.blocks) if owned else match.position // size
        shared, partial = match.blocks[:whole], match.blocks[whole:]
        # With one block for the first token beyond, so that no decode has to preempt right after its prefill.
        ahead = min(sequence.total + 1, cache.blocks.size * size)
        wanted = cache.blocks_for(sequence.total if sequence.background else ahead) - whole
        cache.blocks.acquire(match.blocks)
        if match.state is not None:
            cache.states.acquire((match.state,))
        taken = self._take(wanted, reserve)
        if taken is None:
            if match.state is not None:
                cache.states.release((match.state,))
            cache.release_blocks(match.blocks)
            return False
        blocks, slot = taken
        for source in partial:
            draft.block_copies.append(Copy(source, blocks[0]))
            draft.held_blocks.append(source)
        if match.state is not None and slot is not None:
            draft.state_loads.append(Copy(match.state, slot))
            draft.held_states.append(match.state)
        sequence.block_ids = shared + blocks
        sequence.state_slot = slot
        self._begin(sequence, match)
        return True

    def _hold_all(self, sequence: Sequence, match: Match) -> None:
        self.cache.blocks.acquire(match.blocks)
        sequence.block_ids = match.blocks[:]
        if match.state is not None:
            self.cache.states.acquire((match.state,))
            sequence.state_slot = match.state
        self._begin(sequence, match)

    def _begin(self, sequence: Sequence, match: Match) -> None:
        sequence.computed = match.position
        sequence.chain.spot = match.spot  # what was found is registered: go on from its end
        spare = sequence.spare_split
        if spare is not None and is_close_above(spare, match.position):
            sequence.splits = tuple(position for position in sequence.splits if position != spare)
        if sequence.match is None:
            sequence.match = match
            sequence.prefix_tokens = min(match.position, len(sequence.prompt_ids))
            sequence.high_water = match.position
            self.prefix_hit_tokens += sequence.prefix_tokens

    def take_back(self, sequence: Sequence) -> None:
        """Forget what a sequence has started from."""
        self.prefix_hit_tokens -= sequence.prefix_tokens
        sequence.computed = sequence.high_water = sequence.prefix_tokens = 0
        sequence.match = sequence.arriving = sequence.chain.spot = None
        if sequence.spare_split is not None:
            sequence.splits = tuple(sorted({*sequence.splits, sequence.spare_split}))

    def swap_back(self, draft: Draft, sequence: Sequence, handle: int, reserve: int) -> bool:
        """Memory for a swapped sequence and the copies that fill it."""
        taken = self._take(self.cache.blocks_for(sequence.total), reserve)
        if taken is None:
            return False
        sequence.block_ids, sequence.state_slot = taken
        held = sequence.block_ids[: self.cache.blocks_for(sequence.computed)]
        draft.swap_in.append(Swap(handle, held, sequence.computed, sequence.state_slot))
        return True

    def _take(self, blocks: int, reserve: int) -> tuple[array[int], int | None] | None:
        """That many blocks, and a state slot if the model has states; None (and nothing taken) otherwise."""
        if self.cache.blocks.available < blocks + reserve:
            return None
        slot: int | None = None
        if self.cache.has_state:
            slots = self.cache.states.allocate(1)
            if slots is None:
                return None
            slot = slots[0]
        taken = self.cache.blocks.allocate(blocks)
        return None if taken is None else (taken, slot)
