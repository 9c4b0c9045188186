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


@dataclass(slots=True)
class Draft:
    """Collects a step; `budget` is what is left of the token budget."""

    budget: int
    entries: list[tuple[SequencePlan, Work]] = field(default_factory=list)
    opens: list[RowOpen] = field(default_factory=list)
    swap_out: list[Swap] = field(default_factory=list)
    swap_in: list[Swap] = field(default_factory=list)
    block_copies: list[Copy] = field(default_factory=list)
    state_loads: list[Copy] = field(default_factory=list)
    state_saves: list[Copy] = field(default_factory=list)
    held_blocks: list[int] = field(default_factory=list)
    held_states: list[int] = field(default_factory=list)
    planned: set[Sequence] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        return not self.entries and not self.swap_out

    def add(self, sequence: Sequence, tokens: int, blocks: int, capture_slot: int | None) -> Work:
        """Plan the next `tokens` tokens of a running sequence, whose first `blocks` blocks cover them."""
        if sequence.row is None:
            raise RuntimeError(f"sequence {sequence.key} is planned without a row")
        start, end = sequence.computed, sequence.computed + tokens
        samples = end == sequence.total and not sequence.background
        plan = SequencePlan(
            row=sequence.row,
            start=start,
            token_ids=None if sequence.is_decode else sequence.token_ids(start, end),
            block_ids=sequence.block_ids[:blocks],
            state_slot=sequence.state_slot or 0,
            sample=samples,
            state_target=sequence.spare_slot if sequence.is_decode else None,
            prompt_logprobs=sequence.sampling.prompt_logprobs is not None and start < len(sequence.prompt_ids) - 1,
        )
        work = Work(sequence, start, end, sequence.row, samples, capture_slot)
        if capture_slot is not None:
            self.state_saves.append(Copy(plan.written_slot, capture_slot))
        sequence.spare_is_before = plan.state_target is not None
        if plan.state_target is not None:
            sequence.state_slot, sequence.spare_slot = plan.state_target, plan.state_slot
        self.entries.append((plan, work))
        self.planned.add(sequence)
        self.budget -= tokens
        sequence.computed = end
        sequence.in_flight += samples
        return work

    def seal(self, number: int, closes: list[int], swap_drops: list[int]) -> ScheduledStep:
        # Decodes first: the executor's metadata counts on it.
        self.entries.sort(key=lambda entry: not (entry[0].num_tokens == 1 and entry[0].start > 0))
        plan = StepPlan(
            step=number,
            sequences=tuple(entry[0] for entry in self.entries),
            opens=tuple(self.opens),
            closes=tuple(closes),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            swap_drop=tuple(swap_drops),
            block_copies=tuple(self.block_copies),
            state_loads=tuple(self.state_loads),
            state_saves=tuple(self.state_saves),
        )
        return ScheduledStep(plan, [entry[1] for entry in self.entries], self.held_blocks, self.held_states)
