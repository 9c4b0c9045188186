"""Decides what the next step computes: one loop for decode, chunked prefill, admission and preemption.

Host only, no tensors: everything here is counts and ids, so its properties are tested without a model. Each step
serves, under one token budget: running sequences that decode, then prefill chunks of running sequences, then new
admissions. A prefill reserves the blocks of its whole prompt when it is admitted, so it never stalls half-way; decode
asks for one block every `block_size` tokens and preempts the lowest-ranked sequence when there is none. The
highest-ranked sequence is never preempted, so something always finishes.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from engram_runtime.cache.manager import CacheManager
from engram_runtime.cache.prefix_index import common_prefix
from engram_runtime.engine.admission import Admission
from engram_runtime.engine.sequence import Sequence, Status
from engram_runtime.engine.step import Draft, ScheduledStep, Work
from engram_runtime.engine.swap import SwapLedger
from engram_runtime.executor.plan import CacheGeometry, RowOpen, Swap

FAIR_SHARES = 4
"""Prefills that share a step's budget evenly: a long prompt cannot keep short ones waiting, nor all crawl at once."""
SMALLEST_SHARE = 16
"""No prefill is cut to less than one part in so many of the budget, while there is that much: sharing evenly what is
left, again and again, would end in chunks of one token, each of which costs what one of a hundred does."""
BACKGROUND_CHUNK = 256
"""Tokens a background step may compute: what a request that arrives meanwhile has to wait for."""


@dataclass(slots=True)
class SchedulerCounters:
    preemptions_swapped: int = 0
    preemptions_recomputed: int = 0
    prefilled_tokens: int = 0
    rewarmed_tokens: int = 0
    recomputed_tokens: int = 0
    captures_skipped: int = 0


class Scheduler:
    """Owns the queues. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        geometry: CacheGeometry,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        swap_bytes: int,
    ) -> None:
        self.geometry = geometry
        self.cache = cache
        self.admission = Admission(cache)
        self.swap = SwapLedger(swap_bytes)
        self.counters = SchedulerCounters()
        self._max_tokens = max_num_batched_tokens
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        """In order of rank, as `_waiting`."""
        self._closes: list[int] = []
        self._steps = 0
        self._in_flight: deque[ScheduledStep] = deque()

    # Queues

    @property
    def running(self) -> int:
        return sum(not s.background for s in self._running)

    @property
    def waiting(self) -> int:
        return sum(s.status is Status.WAITING and not s.background for s in self._waiting)

    @property
    def background(self) -> int:
        return sum(s.background for s in self.sequences())

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def is_short_of_blocks(self) -> bool:
        """Whether the next step may have to preempt: not everybody who runs can have one more block."""
        return self.cache.blocks.available < len(self._running)

    def may_run_ahead(self) -> bool:
        """Whether a step may be planned before the last one's results are known; takes what that needs.

        A recurrent state moves on with every token, and the one at a turn's end must outlive a step that went past it.
        So decodes of such models alternate between two slots, and nothing runs ahead while there is none for somebody.
        """
        if not self.cache.has_state:
            return True
        need = [s for s in self._running if not s.background and s.row is not None and s.spare_slot is None]
        if self.cache.states.available < len(need) + len(self._running):
            return not need
        for sequence in need:
            slots = self.cache.states.allocate(1)
            if slots is None:
                return False
            sequence.spare_slot = slots[0]
        return True

    def sequences(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the pool (the caller has checked)."""
        _file(self._waiting, sequence, Status.WAITING)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it was doing, and give back what it held."""
        if sequence.status is Status.FINISHED:
            return
        for queue in (self._running, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.swap_handle is not None:
            self.swap.drop(sequence.swap_handle)
            sequence.swap_handle = None
        self._give_back(sequence)
        self._drop_lease(sequence)
        sequence.status = Status.FINISHED

    def restart(self, sequence: Sequence) -> None:
        """Let a sequence whose prefix did not arrive soundly begin anew; no step with it is under way."""
        if sequence.status is Status.FINISHED:
            return
        self.finish(sequence)
        self.admission.take_back(sequence)
        again = sequence.prefilled_tokens  # all of it is computed a second time
        self.counters.prefilled_tokens -= again
        self.counters.recomputed_tokens += again
        sequence.prefilled_tokens, sequence.recomputed_tokens = 0, sequence.recomputed_tokens + again
        _file(self._waiting, sequence, Status.WAITING)

    def take_state(self, sequence: Sequence) -> int | None:
        """Hand the state at `computed` over to the caller (who releases it): the sequence is about to finish.

        None when the model has no state, or the step that is under way overwrites it.
        """
        if sequence.in_flight and not sequence.spare_is_before:
            return None
        if sequence.in_flight:
            slot, sequence.spare_slot = sequence.spare_slot, None
        else:
            slot, sequence.state_slot = sequence.state_slot, None
        return slot

    def complete_background(self) -> list[Sequence]:
        """Background sequences that were admitted with nothing left to compute (so they have no row)."""
        return [s for s in self._running if s.background and s.row is None]

    # Planning

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can run now."""
        draft = Draft(self._max_tokens)
        foreground = any(not s.background for s in self.sequences())
        self._plan_decodes(draft)
        self._plan_prefills(draft, background=False)
        if not foreground:
            draft.budget = min(draft.budget, BACKGROUND_CHUNK)
            self._plan_prefills(draft, background=True)
        if draft.is_empty:
            return None
        step = draft.seal(self._steps, self._closes, self.swap.take_drops())
        self._closes = []
        self._steps += 1
        self._in_flight.append(step)
        return step

    def go_on(self, step: ScheduledStep, more: int) -> list[ScheduledStep]:
        """`more` decodes of the sequences of `step` behind it, if that is all there is to do: nobody waits, nobody
        reaches its length in them, and there are blocks for all of it without taking any from somebody. Otherwise none:
        each number of steps in a launch is a recording of its own."""
        running = self._running
        if self._waiting or len(step.work) != len(running) or not step.only_decodes:
            return []
        if any(len(s.output_ids) + s.in_flight + more > s.max_new_tokens for s in running):
            return []
        if self.cache.blocks.available < len(running) * self.cache.blocks_for(more):
            return []
        steps = [self.schedule() for _ in range(more)]
        planned = [following for following in steps if following is not None]
        if len(planned) < more:
            raise RuntimeError("decodes that may go on were not planned")
        return planned

    def _plan_decodes(self, draft: Draft) -> None:
        running, size = Status.RUNNING, self.cache.block_size
        for sequence in tuple(self._running):
            # Whoever comes late in this list may have been preempted by one before.
            if sequence.status is not running or not sequence.may_decode:
                continue
            room = sequence.computed < len(sequence.block_ids) * size
            if draft.budget > 0 and (room or self._grow(draft, sequence)):
                self._emit_decode(draft, sequence)

    def _grow(self, draft: Draft, sequence: Sequence) -> bool:
        """A block for one more token, taken from lower-ranked sequences if need be."""
        while True:
            blocks = self.cache.blocks.allocate(1)
            if blocks is not None:
                sequence.block_ids += blocks
                return True
            if self._shed_lease():
                continue
            victim = next(s for s in reversed(self._running) if s not in draft.planned)
            if victim is sequence and len(self._running) == 1:
                return False  # only somebody's passing lease is in the way: try again next step
            self._preempt(draft, victim)
            if victim is sequence:
                return False

    def _plan_prefills(self, draft: Draft, *, background: bool) -> None:
        """Chunks for admitted prefills, then for whoever can be admitted, in order of rank."""
        running = [s for s in self._running if s.background == background and s not in draft.planned]
        running = [s for s in running if not s.is_decode and s.remaining > 0]
        queue = [s for s in self._waiting if s.background == background]
        computing = [s for s in self._running if _is_computing(s)] if queue else []
        left, grants = draft.budget, list[tuple[Sequence, int]]()
        least = self._max_tokens // SMALLEST_SHARE
        while (running or queue) and left > 0:
            share = min(left, max(least, -(-left // min(FAIR_SHARES, len(running) + len(queue)))))
            sequence = running.pop(0) if running else queue.pop(0)
            if sequence.status is Status.WAITING and self._is_coming(sequence, computing):
                continue
            # In order: nobody overtakes one that waits for room, or a long prompt might wait for ever.
            if sequence.status is not Status.RUNNING:
                if not self._admit(draft, sequence):
                    break
                if _is_computing(sequence):
                    computing.append(sequence)
            if sequence.remaining > 0:
                grants.append((sequence, self._chunk(sequence, share)))
                left -= grants[-1][1]
        for sequence, tokens in grants:
            longer = self._chunk(sequence, tokens + left)
            left -= longer - tokens
            if sequence.is_decode:  # it is back from the host
                self._emit_decode(draft, sequence)
            else:
                self._emit(draft, sequence, longer)

    def _chunk(self, sequence: Sequence, most: int) -> int:
        """Tokens of the next chunk: at most `most`, never across a position where something is captured."""
        split = sequence.next_split()
        reach = sequence.total if split is None else min(split, sequence.total)
        return min(most, reach - sequence.computed)

    def _is_coming(self, sequence: Sequence, computing: list[Sequence]) -> bool:
        """Whether one of those is just computing what this sequence would compute: wait, and share it."""
        leader = sequence.leader
        if leader is not None and leader.status is not Status.FINISHED and leader.done < len(leader.prompt_ids):
            return True
        if self.cache.has_state or not sequence.use_prefix or sequence.background:
            return False
        size = self.cache.block_size
        return any(
            common_prefix(sequence.prompt_ids, other.prompt_ids) // size * size > other.done
            for other in computing
            if other.tenant == sequence.tenant
        )

    def _emit_decode(self, draft: Draft, sequence: Sequence) -> None:
        start = sequence.computed
        work = draft.decode(sequence, start // self.cache.block_size + 1)
        if start < sequence.high_water or start < len(sequence.prompt_ids):
            self._count(work)

    def _emit(self, draft: Draft, sequence: Sequence, tokens: int) -> None:
        end = sequence.computed + tokens
        slot: int | None = None
        if end in sequence.splits and sequence.state_slot is not None:
            slots = self.cache.states.allocate(1)
            slot = None if slots is None else slots[0]
            self.counters.captures_skipped += slot is None
        self._count(draft.prefill(sequence, tokens, self.cache.blocks_for(end), slot))

    def _count(self, work: Work) -> None:
        """Add to exactly one of prefilled, rewarmed, recomputed; a decode of a new token is none of them."""
        sequence = work.sequence
        again = max(0, min(work.end, sequence.high_water) - work.start)
        fresh = max(0, min(work.end, len(sequence.prompt_ids)) - max(work.start, sequence.high_water))
        sequence.recomputed_tokens += again
        sequence.prefilled_tokens += fresh
        self.counters.recomputed_tokens += again
        if sequence.background:
            self.counters.rewarmed_tokens += fresh
        else:
            self.counters.prefilled_tokens += fresh

    # Admission and preemption

    def _admit(self, draft: Draft, sequence: Sequence) -> bool:
        while not self._try_admit(draft, sequence):
            idle = next((s for s in self._running if s.background and s not in draft.planned), None)
            if idle is not None and not sequence.background:
                self._preempt(draft, idle)
            elif not self._free_rows or not self._shed_lease(below=sequence):
                return False
        return True

    def _try_admit(self, draft: Draft, sequence: Sequence) -> bool:
        if not self._free_rows:
            return False
        reserve = len(self._running)
        if sequence.swap_handle is not None:
            if not self.admission.swap_back(draft, sequence, sequence.swap_handle, reserve):
                return False
            self.swap.give_back(sequence.swap_handle)
            sequence.swap_handle = None
        elif not self.admission.start(draft, sequence, reserve):
            return False
        self._drop_lease(sequence)
        self._waiting.remove(sequence)
        _file(self._running, sequence, Status.RUNNING)
        if sequence.remaining > 0:
            sequence.row = self._free_rows.pop()
            opened = RowOpen(sequence.row, sequence.sampling, sequence.prompt_ids, tuple(sequence.output_ids))
            draft.opens.append(opened)
        return True

    def _preempt(self, draft: Draft, sequence: Sequence) -> None:
        """Take all memory from a running sequence: to the host if there is room there, else it starts again."""
        self._running.remove(sequence)
        size = sequence.computed * self.geometry.kv_bytes_per_token + self.geometry.state_bytes
        # Background work is cheap to lose: its blocks stay findable until somebody needs them.
        handle = None if sequence.background else self.swap.take(size)
        sequence.high_water = max(sequence.high_water, sequence.computed)
        if handle is not None:
            blocks = sequence.block_ids[: self.cache.blocks_for(sequence.computed)]
            draft.swap_out.append(Swap(handle, blocks, sequence.computed, sequence.state_slot))
            sequence.swap_handle = handle
            self.counters.preemptions_swapped += 1
        else:
            sequence.computed = 0
            self.counters.preemptions_recomputed += 1
        self._give_back(sequence)
        _file(self._waiting, sequence, Status.WAITING if handle is None else Status.SWAPPED)

    def _shed_lease(self, below: Sequence | None = None) -> bool:
        """Those who wait may lose what was restored for them before anybody who runs is preempted."""
        for sequence in reversed(self._waiting):
            if sequence is below:
                return False
            if sequence.lease is not None:
                self._drop_lease(sequence)
                return True
        return False

    def _drop_lease(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None

    def _give_back(self, sequence: Sequence) -> None:
        self.cache.release_blocks(sequence.block_ids)
        sequence.block_ids = array("i")
        held = tuple(slot for slot in (sequence.state_slot, sequence.spare_slot) if slot is not None)
        self.cache.states.release(held)
        sequence.state_slot = sequence.spare_slot = None
        if sequence.row is not None:
            self._closes.append(sequence.row)
            self._free_rows.append(sequence.row)
            sequence.row = None

    # Results

    def complete(self, step: ScheduledStep) -> None:
        """The step has run: what it computed can be found from now on."""
        if not self._in_flight or self._in_flight[0] is not step:
            raise RuntimeError("steps complete in the order they were scheduled")
        self._in_flight.popleft()
        for block in step.held_blocks:  # one by one: several sequences may have copied from the same
            self.cache.blocks.release((block,))
        for slot in step.held_states:
            self.cache.states.release((slot,))
        size = self.cache.block_size
        for work in step.work:
            sequence = work.sequence
            sequence.in_flight -= work.samples
            sequence.high_water = max(sequence.high_water, work.end)
            filled = work.end // size > work.start // size
            if filled and sequence.status is Status.RUNNING and sequence.arriving is None:
                self.cache.register_from(sequence.chain, sequence.token_ids, sequence.block_ids, work.end)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block, slot, row and host buffer is accounted for."""
        blocks: Counter[int] = Counter()
        states: Counter[int] = Counter()
        for sequence in self.sequences():
            blocks.update(sequence.block_ids)
            states.update(slot for slot in (sequence.state_slot, sequence.spare_slot) if slot is not None)
        for step in self._in_flight:
            blocks.update(step.held_blocks)
            states.update(step.held_states)
            states.update(work.capture_slot for work in step.work if work.capture_slot is not None)
        self.cache.check_integrity(blocks, states)
        rows = [s.row for s in self._running if s.row is not None]
        assert len(set(rows)) == len(rows), "two sequences share a row"
        assert not set(rows) & set(self._free_rows), "a row is in use and free"
        handles = {s.swap_handle for s in self._waiting if s.swap_handle is not None}
        assert handles == self.swap.handles, "a host buffer is lost"


def _is_computing(sequence: Sequence) -> bool:
    """Whether others cannot find all of a request's prompt yet."""
    return not sequence.background and sequence.done < len(sequence.prompt_ids)


def _file(queue: list[Sequence], sequence: Sequence, status: Status) -> None:
    """Put it where its rank says."""
    sequence.status = status
    insort(queue, sequence, key=lambda s: s.rank)
