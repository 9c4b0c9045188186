"""A step being put together, and a step that was: the scheduler's own view beside the executor's plain plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from engram_runtime.engine.sequence import Sequence
from engram_runtime.executor.plan import Copy, RowOpen, SequencePlan, StepPlan, Swap


@dataclass(slots=True)
class Work:
    """What one step does for one sequence: tokens [start, end)."""

    sequence: Sequence
    start: int
    end: int
    row: int
    samples: bool
    capture_slot: int | None = None
    """Checkpoint slot that receives the state at `end`; one reference is the receiver's to release."""


@dataclass(slots=True)
class ScheduledStep:
    plan: StepPlan
    work: list[Work]
    held_blocks: list[int]
    """Copy sources, kept until the step has run."""
    held_states: list[int]

    @property
    def only_decodes(self) -> bool:
        """Nothing but tokens that follow others, and rows that close."""
        plan = self.plan
        swaps = plan.swap_out, plan.swap_in, plan.swap_drop
        copies = plan.block_copies, plan.state_loads, plan.state_saves
        return not any((plan.opens, *swaps, *copies)) and all(s.token_ids is None for s in plan.sequences)


@dataclass(slots=True)
class Draft:
    """Collects a step; `budget` is what is left of the token budget."""

    budget: int
    decodes: list[SequencePlan] = field(default_factory=list)
    """Of one token behind others: the executor's metadata counts on these coming before all chunks."""
    chunks: list[SequencePlan] = field(default_factory=list)
    decode_work: list[Work] = field(default_factory=list)
    chunk_work: list[Work] = field(default_factory=list)
    opens: list[RowOpen] = field(default_factory=list)
    swap_out: list[Swap] = field(default_factory=list)
    swap_in: list[Swap] = field(default_factory=list)
    block_copies: list[Copy] = field(default_factory=list)
    state_loads: list[Copy] = field(default_factory=list)
    state_saves: list[Copy] = field(default_factory=list)
    held_blocks: list[int] = field(default_factory=list)
    held_states: list[int] = field(default_factory=list)
    planned: set[Sequence] = field(default_factory=set)
    after: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.chunks or self.swap_out)

    def decode(self, sequence: Sequence, blocks: int) -> Work:
        """Plan the next token of a running sequence that decodes, whose first `blocks` blocks have room for it."""
        row, start, before, after = sequence.row, sequence.computed, sequence.state_slot, sequence.spare_slot
        if row is None:
            raise RuntimeError(f"sequence {sequence.key} is planned without a row")
        self.decodes.append(SequencePlan(row, start, None, sequence.block_ids[:blocks], before or 0, True, after))
        sequence.spare_is_before = after is not None
        if after is not None:
            sequence.state_slot, sequence.spare_slot = after, before
        work = Work(sequence, start, start + 1, row, True)
        self.decode_work.append(work)
        self._note(work)
        return work

    def prefill(self, sequence: Sequence, tokens: int, blocks: int, capture_slot: int | None) -> Work:
        """Plan the next `tokens` known tokens of a running sequence, whose first `blocks` blocks cover them."""
        if sequence.row is None:
            raise RuntimeError(f"sequence {sequence.key} is planned without a row")
        start, end = sequence.computed, sequence.computed + tokens
        samples = end == sequence.total and not sequence.background
        plan = SequencePlan(
            row=sequence.row,
            start=start,
            token_ids=sequence.token_ids(start, end),
            block_ids=sequence.block_ids[:blocks],
            state_slot=sequence.state_slot or 0,
            sample=samples,
            prompt_logprobs=sequence.sampling.prompt_logprobs is not None and start < len(sequence.prompt_ids) - 1,
        )
        work = Work(sequence, start, end, sequence.row, samples, capture_slot)
        if capture_slot is not None:
            self.state_saves.append(Copy(plan.state_slot, capture_slot))
        sequence.spare_is_before = False
        single = tokens == 1 and start > 0
        (self.decodes if single else self.chunks).append(plan)
        (self.decode_work if single else self.chunk_work).append(work)
        self._note(work)
        return work

    def _note(self, work: Work) -> None:
        sequence = work.sequence
        self.planned.add(sequence)
        self.budget -= work.end - work.start
        sequence.computed = work.end
        sequence.in_flight += work.samples

    def seal(self, number: int, closes: list[int], swap_drops: list[int]) -> ScheduledStep:
        plan = StepPlan(
            step=number,
            sequences=(*self.decodes, *self.chunks),
            opens=tuple(self.opens),
            closes=tuple(closes),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            swap_drop=tuple(swap_drops),
            block_copies=tuple(self.block_copies),
            state_loads=tuple(self.state_loads),
            state_saves=tuple(self.state_saves),
            after=self.after,
        )
        return ScheduledStep(plan, self.decode_work + self.chunk_work, self.held_blocks, self.held_states)
