"""The scheduler alone, on an executor that knows only digests: everybody finishes, nothing leaks or gets mixed up."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.cache.manager import CacheManager
from engram_runtime.engine.scheduler import BACKGROUND_CHUNK, FAIR_SHARES, Scheduler
from engram_runtime.engine.sequence import Sequence, Status
from engram_runtime.executor.plan import RowSampling
from tests.unit.engine.fakes import FakeExecutor, geometry, oracle

BLOCK = 4


class Harness:
    """Drives a scheduler to the end, checking every promise after every step."""

    def __init__(
        self, *, blocks: int = 32, states: int = 0, seqs: int = 4, budget: int = 8, swap: int = 0, window: int = 64
    ) -> None:
        sizes = geometry(blocks=blocks, states=states, window=window)
        self.cache = CacheManager(blocks, BLOCK, states)
        self.scheduler = Scheduler(sizes, self.cache, max_num_seqs=seqs, max_num_batched_tokens=budget, swap_bytes=swap)
        self.executor = FakeExecutor(sizes, max_tokens=budget)
        self.count = 0
        self.chunks: list[tuple[Sequence, int, int]] = []
        self.all: list[Sequence] = []

    def add(
        self,
        prompt: list[int],
        new: int = 4,
        *,
        priority: int = 0,
        background: bool = False,
        splits: tuple[int, ...] = (),
        leader: Sequence | None = None,
    ) -> Sequence:
        self.count += 1
        sequence = Sequence(
            key=f"{self.count:04d}",
            tenant="t",
            prompt_ids=array("I", prompt),
            sampling=RowSampling(),
            max_new_tokens=0 if background else new,
            arrival=float(self.count),
            priority=priority,
            background=background,
            splits=splits,
            leader=leader,
        )
        self.all.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        """One step; False when nothing could run."""
        step = self.scheduler.schedule()
        complete = self.scheduler.complete_background()
        for sequence in complete:
            self.scheduler.finish(sequence)
        if step is None:
            self.scheduler.check_integrity()
            return bool(complete)
        self.executor.submit(step.plan)
        result = self.executor.collect()
        self.scheduler.complete(step)
        for work in step.work:
            sequence = work.sequence
            self.chunks.append((sequence, work.start, work.end))
            if work.capture_slot is not None:
                node = self.cache.register(
                    sequence.chain, sequence.token_ids(0, work.end), sequence.block_ids, work.end, partial=True
                )
                assert node is not None
                self.cache.record(node, work.end, work.capture_slot)
                self.cache.states.release((work.capture_slot,))
            if work.row in result.sampled and work.samples:
                sequence.output_ids.append(result.sampled[work.row].token_id)
                if len(sequence.output_ids) >= sequence.max_new_tokens:
                    self.finish(sequence)
            elif sequence.background and sequence.remaining == 0:
                self.finish(sequence)
        self.scheduler.check_integrity()
        return True

    def finish(self, sequence: Sequence) -> None:
        """As the engine does it: what was computed stays findable."""
        slot = self.scheduler.take_state(sequence)
        node = self.cache.register(
            sequence.chain,
            sequence.token_ids(0, sequence.computed),
            sequence.block_ids,
            sequence.computed,
            partial=True,
        )
        if node is not None:
            self.cache.record(node, sequence.computed, slot)
        if slot is not None:
            self.cache.states.release((slot,))
        self.scheduler.finish(sequence)

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            assert self.step(), "work is left but nothing runs"
        assert not self.scheduler.has_work, "some sequence starves"
        assert self.cache.blocks.held == 0
        assert self.cache.states.held == 0
        for sequence in self.all:
            assert sequence.status is Status.FINISHED
            if not sequence.background:
                assert sequence.output_ids == oracle(sequence.prompt_ids, sequence.max_new_tokens)


def test_prefill_is_cut_to_the_budget_and_mixed_with_decode() -> None:
    harness = Harness(budget=8)
    first = harness.add([1] * 4, new=20)
    harness.step()
    harness.add([2] * 20)
    harness.step()
    plan = harness.executor.history[-1]
    assert [(s.num_tokens, s.start > 0) for s in plan.sequences] == [(1, True), (7, False)]
    assert plan.sequences[0].token_ids is None
    harness.run()
    assert len(first.output_ids) == 20


def test_a_long_prompt_leaves_room_for_short_ones() -> None:
    harness = Harness(budget=16, seqs=8)
    long = harness.add(list(range(60)), new=1)
    short = [harness.add([80 + i] * 3, new=1) for i in range(3)]
    harness.step()
    assert all(s.status is Status.FINISHED for s in short)
    assert long.computed >= 16 // FAIR_SHARES


def test_budget_that_short_prompts_leave_goes_to_the_long_one() -> None:
    harness = Harness(budget=16)
    long = harness.add(list(range(60)), new=1)
    harness.add([90], new=1)
    harness.step()
    assert long.computed == 15


def test_a_lower_priority_value_is_admitted_first() -> None:
    harness = Harness(seqs=1)
    late = harness.add([1] * 3, priority=1)
    early = harness.add([2] * 3, priority=0)
    harness.step()
    assert early.status is Status.RUNNING
    assert late.status is Status.WAITING
    harness.run()


def test_background_work_waits_for_every_request() -> None:
    harness = Harness(budget=8, seqs=4)
    warm = harness.add(list(range(20)), background=True)
    harness.step()
    assert warm.computed == 8
    request = harness.add([50] * 3, new=3)
    for _ in range(3):
        harness.step()
        assert warm.computed == 8
    assert request.status is Status.FINISHED
    harness.run()
    assert harness.scheduler.counters.rewarmed_tokens == 20
    assert harness.scheduler.counters.prefilled_tokens == 3


def test_background_work_gives_its_memory_to_a_request() -> None:
    harness = Harness(blocks=6, budget=16, seqs=1)
    warm = harness.add(list(range(22)), background=True)
    harness.step()
    harness.add([60] * 10, new=4)
    harness.step()
    assert warm.status is Status.WAITING
    harness.run()


def test_a_background_step_is_short() -> None:
    harness = Harness(blocks=200, budget=1000, window=800)
    warm = harness.add([5] * 700, background=True)
    harness.step()
    assert warm.computed == BACKGROUND_CHUNK


def test_background_work_that_is_already_cached_computes_nothing() -> None:
    harness = Harness()
    harness.add(list(range(10)), background=True)
    harness.run()
    seen = harness.executor.rows_seen
    again = harness.add(list(range(10)), background=True)
    harness.run()
    assert harness.executor.rows_seen == seen
    assert again.prefix_tokens == 10


def test_siblings_wait_for_the_leader_and_share_its_prompt() -> None:
    harness = Harness(budget=8)
    prompt = list(range(18))
    leader = harness.add(prompt)
    sibling = harness.add(prompt, leader=leader)
    while leader.computed < len(prompt):
        harness.step()
        assert sibling.status is Status.WAITING
    harness.run()
    assert sibling.prefix_tokens >= 16


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    harness = Harness(blocks=64, budget=8)
    prompts = [[*range(21), 80 + number] for number in range(3)]
    for prompt in prompts:
        harness.add(prompt, new=2)
    other = harness.add([70] * 5, new=2)
    harness.step()
    assert other.status is Status.RUNNING  # those who wait for a prefix hold up nobody else
    harness.run()
    assert harness.scheduler.counters.prefilled_tokens == 22 + 2 * 2 + 5


@pytest.mark.parametrize("states", [0, 6])
@pytest.mark.parametrize("swap", [0, 1000])
def test_preempted_sequences_go_on_where_they_were(states: int, swap: int) -> None:
    harness = Harness(blocks=6, seqs=3, budget=12, swap=swap, states=states, window=24)
    for token in (1, 2, 3):
        harness.add([token] * 6, new=10)
    harness.run()
    counters = harness.scheduler.counters
    assert counters.preemptions_swapped + counters.preemptions_recomputed > 0
    if swap:
        assert counters.recomputed_tokens == 0
    else:
        assert counters.recomputed_tokens > 0


def test_recomputed_and_prefilled_are_kept_apart() -> None:
    harness = Harness(blocks=6, seqs=3, budget=12, window=24)
    for token in (1, 2, 3):
        harness.add([token] * 6, new=10)
    harness.run()
    counters = harness.scheduler.counters
    assert counters.prefilled_tokens == 18
    # Of 10 generated tokens 9 are forwarded; everything the executor saw is accounted for exactly once.
    assert harness.executor.rows_seen == 18 + 3 * 9 + counters.recomputed_tokens


def test_a_sequence_that_needs_the_whole_pool_is_not_kept_waiting_by_its_own_prefix() -> None:
    harness = Harness(blocks=6, seqs=2, budget=32, window=24)
    harness.add(list(range(22)), new=2)
    harness.run()
    harness.add([*range(21), 77], new=2)
    harness.run()


def test_abort_gives_everything_back_in_every_state() -> None:
    harness = Harness(blocks=6, seqs=2, budget=4, swap=1000, window=24)
    running = harness.add([1] * 6, new=12)
    swapped = harness.add([2] * 6, new=12)
    while swapped.status is not Status.SWAPPED:
        assert harness.step()
    waiting = harness.add([3] * 6)
    for sequence in (waiting, swapped, running):
        harness.scheduler.finish(sequence)
        harness.scheduler.check_integrity()
    assert harness.cache.blocks.held == 0
    assert len(harness.scheduler.swap) == 0
    harness.all.clear()
    harness.add([4] * 6)
    harness.run()
    assert harness.executor.swapped == {}


def test_waiting_requests_lose_their_lease_before_a_running_one_is_preempted() -> None:
    harness = Harness(blocks=6, seqs=1, budget=16, window=24)
    running = harness.add([1] * 4, new=16)
    harness.step()
    leased = harness.cache.blocks.allocate(4)
    assert leased is not None
    waiting = harness.add([2] * 4)
    waiting.lease = harness.cache.adopt(leased)
    harness.run()
    assert harness.scheduler.counters.preemptions_recomputed == 0
    assert running.status is Status.FINISHED


@dataclass(frozen=True)
class Spec:
    """A request of the property test: prompts share prefixes, so the index is always involved."""

    family: int
    shared: int
    own: int
    new: int
    priority: int
    background: bool
    split: int
    delay: int


specs = st.builds(
    Spec,
    family=st.integers(0, 1),
    shared=st.integers(0, 14),
    own=st.integers(1, 9),
    new=st.integers(1, 9),
    priority=st.integers(-1, 1),
    background=st.booleans(),
    split=st.integers(0, 23),
    delay=st.integers(0, 3),
)


@given(
    st.lists(specs, min_size=1, max_size=9),
    st.integers(8, 20),
    st.integers(1, 4),
    st.integers(4, 16),
    st.sampled_from([0, 20, 1000]),
    st.booleans(),
)
def test_whatever_arrives_finishes_with_the_right_tokens(
    requests: list[Spec], blocks: int, seqs: int, budget: int, swap: int, recurrent: bool
) -> None:
    harness = Harness(
        blocks=blocks, seqs=seqs, budget=max(budget, seqs), swap=swap, states=seqs + 3 if recurrent else 0, window=32
    )
    for number, spec in enumerate(requests):
        prompt = [spec.family] * spec.shared + [number % 5] * spec.own
        splits = (spec.split,) if recurrent and 0 < spec.split < len(prompt) else ()
        harness.add(prompt, spec.new, priority=spec.priority, background=spec.background, splits=splits)
        for _ in range(spec.delay):
            harness.step()
    harness.run()
    for sequence, start, end in harness.chunks:
        assert not any(start < split < end for split in sequence.splits), "a chunk ran across a boundary"
    assert harness.executor.rows_seen == (
        harness.scheduler.counters.prefilled_tokens
        + harness.scheduler.counters.rewarmed_tokens
        + harness.scheduler.counters.recomputed_tokens
        + sum(len(s.output_ids) - 1 for s in harness.all if not s.background)
    )
