"""How a step's budget is shared among prompts, and in which order sequences are served and give way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.engine.scheduler import FAIR_SHARES, SMALLEST_SHARE
from engram_runtime.engine.sequence import Sequence, Status
from tests.unit.engine.test_scheduler import Harness

BUDGET = 64
LEAST = BUDGET // SMALLEST_SHARE


def roomy(budget: int = BUDGET, seqs: int = 40, window: int = 64) -> Harness:
    return Harness(blocks=seqs * window // 4, seqs=seqs, budget=budget, window=window)


def steps_of(harness: Harness) -> list[list[tuple[Sequence, int, int]]]:
    """Step to the end; the (sequence, start, end) of each step."""
    steps = []
    while harness.scheduler.has_work:
        before = len(harness.chunks)
        assert harness.step(), "work is left but nothing runs"
        steps.append(harness.chunks[before:])
    return steps


def test_prompts_as_short_as_the_smallest_share_fill_a_step_whole() -> None:
    harness = roomy()
    for number in range(2 * SMALLEST_SHARE):
        harness.add([number] * LEAST, new=1)
    assert [[end - start for _, start, end in step] for step in steps_of(harness)] == [[LEAST] * SMALLEST_SHARE] * 2
    harness.run()


def test_many_long_prompts_go_on_at_once_and_none_of_them_by_crumbs() -> None:
    harness = roomy()
    for number in range(12):
        harness.add([number] * 60, new=1)
    harness.step()
    lengths = [end - start for _, start, end in harness.chunks]
    assert lengths[0] == BUDGET // FAIR_SHARES
    assert len(lengths) > 2 * FAIR_SHARES
    assert sum(lengths) == BUDGET
    assert all(length >= LEAST for length in lengths[:-1])
    harness.run()


def test_a_short_prompt_gets_in_beside_twice_as_many_long_ones_as_there_are_fair_shares() -> None:
    harness = roomy()
    for number in range(2 * FAIR_SHARES - 1):
        harness.add([number] * 60, new=1)
    short = harness.add([90] * 3, new=1)
    harness.step()
    assert short.status is Status.FINISHED
    harness.run()


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(0, 12),
    st.sampled_from([BUDGET, 3 * BUDGET]),
)
def test_only_one_chunk_of_a_step_is_a_crumb(lengths: list[int], decoding: int, budget: int) -> None:
    """Whatever arrives, and however many decode meanwhile: what ends no prompt is one chunk of a step at most, or as
    long as the smallest share."""
    harness = roomy(budget, window=80)
    for number in range(decoding):
        harness.add([number], new=15)
    harness.step()
    for number, length in enumerate(lengths):
        harness.add([30 + number] * length, new=2)
    for step in steps_of(harness):
        chunks = [(s, end - start) for s, start, end in step if start < len(s.prompt_ids) and end < len(s.prompt_ids)]
        assert sum(length < budget // SMALLEST_SHARE for _, length in chunks) <= 1
        assert sum(end - start for _, start, end in step) <= budget
    harness.run()


def test_decodes_are_served_in_order_of_rank_whenever_they_were_admitted() -> None:
    harness = Harness(budget=8, seqs=4)
    late = harness.add([1] * 3, new=4, priority=2)
    harness.step()
    early = harness.add([2] * 3, new=4, priority=0)
    middle = harness.add([3] * 3, new=4, priority=1)
    harness.step()
    before = len(harness.chunks)
    harness.step()
    assert [sequence for sequence, _, _ in harness.chunks[before:]] == [early, middle, late]
    harness.run()


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_the_one_of_lowest_rank_gives_way_whenever_it_was_admitted(swap: int) -> None:
    harness = Harness(blocks=10, budget=32, seqs=3, swap=swap)
    urgent = harness.add([1] * 8, new=20, priority=0)
    lowest = harness.add([2] * 4, new=20, priority=5)
    harness.step()
    last = harness.add([3] * 4, new=20, priority=3)
    seen = []
    while lowest.status is Status.RUNNING and harness.step():
        seen.append((urgent.status, last.status))
    assert lowest.status in (Status.WAITING, Status.SWAPPED), "nobody had to give way"
    assert seen[-1] == (Status.RUNNING, Status.RUNNING)
    harness.run()
