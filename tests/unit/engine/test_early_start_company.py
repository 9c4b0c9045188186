"""An early start beside what the device has already: its pages, the marks of its turns, and what it gains meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engram_runtime.engine.outputs import Collector
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.snapshots.types import Fetched, Miss, RestoreQuery
from tests.support import patience
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import EMPTY, FakeSnapshots, grow, oracle
from tests.unit.engine.restoring import HELD, NEW, Copying, ask, device_of, next_prompt, report_of, start

Make = Callable[..., Bench]
EARLY = pytest.mark.parametrize("early", [False, True], ids=["waits", "early"])


@pytest.fixture
def states() -> int:
    """Only recurrent models lose a state and keep its pages."""
    return 16


def make(bench: Make, stored: FakeSnapshots, early: bool) -> Bench:
    one = bench(states=16, store=stored, executor=Copying, budget=64)
    if not early:
        let_nobody_start_early(one)
    return one


def let_nobody_start_early(one: Bench) -> None:
    restorer = one.engine._restorer
    assert restorer is not None
    poll = restorer.poll
    restorer.poll = lambda *, alone: poll(alone=False)  # type: ignore[method-assign]
    device_of(one).soon = 0.0


def forget_states(one: Bench) -> None:
    pool = one.engine._cache.states
    pool.release(pool.allocate(pool.available) or [])


def check_findable(one: Bench) -> None:
    """Whatever can be found holds what its tokens say."""
    executor, size = one.executor, one.engine._cache.block_size
    stack = [(run, EMPTY) for root in one.engine._cache.index._roots.values() for run in root.children.values()]
    while stack:
        run, digest = stack.pop()
        for at, token in enumerate(run.tokens):
            digest = grow(digest, token)
            place = run.start * size + at
            assert executor.kv[run.blocks[at // size]][at % size] == digest, f"token {place} is wrong"
            slot = run.states.get(place + 1)
            assert slot is None or executor.states[slot] == digest, f"the state at {place + 1} is wrong"
        stack += [(child, digest) for child in run.children.values()]


@pytest.mark.parametrize("damaged", [False, True])
def test_where_only_a_state_is_missing_nobody_writes_into_pages_that_others_find(
    bench: Make, stored: FakeSnapshots, damaged: bool
) -> None:
    """The pages of the history are still there, and further than the snapshot; its state was evicted."""
    one = make(bench, stored, early=True)
    device = device_of(one)
    device.soon = 0.0
    prompt = next_prompt(*range(20, 40))
    one.engine.add_request("before", prompt, SamplingParams(max_tokens=2))
    one.run()
    forget_states(one)
    check_findable(one)
    found = {block for run in one.engine._cache.index._runs.values() for block in run.blocks}
    device.damaged = damaged
    device.history.clear()
    report = report_of(ask(one, prompt, boundaries={"history": 34}, save=False))
    assert report.restore_failed == damaged
    assert device.followed == []
    size = one.engine._cache.block_size
    written = {block for plan in device.history for s in plan.sequences for block in s.block_ids[s.start // size :]}
    assert not found & written
    check_findable(one)
    device.damaged = False
    one.engine.add_request("other", [*prompt[:34], 7, 8], SamplingParams(max_tokens=NEW), turn=TurnSpec())
    assert one.run()["other", 0].token_ids == oracle([*prompt[:34], 7, 8], NEW)


@EARLY
def test_a_turn_has_the_number_that_it_has_when_it_waits(bench: Make, stored: FakeSnapshots, early: bool) -> None:
    """The device knows a later turn than the snapshot is of; its state was evicted, so the snapshot is restored."""
    one = make(bench, stored, early)
    device = device_of(one)
    second = next_prompt(52)
    assert report_of(ask(one, second, conversation_id="c", save=False)).turn_number == 2
    forget_states(one)
    device.soon = 0.0  # nobody follows the copy: only the state was missing
    device.there.clear()
    report = report_of(ask(one, [*second, *oracle(second, NEW), 60, 61], conversation_id="c"))
    assert report.restored_tokens == HELD
    assert report.turn_number == 3


@EARLY
def test_after_damage_boundaries_are_captured_as_without_a_restore(
    bench: Make, stored: FakeSnapshots, early: bool
) -> None:
    one = make(bench, stored, early)
    device_of(one).damaged = True
    prompt, begin = next_prompt(*range(20, 30)), HELD + 1
    report = report_of(ask(one, prompt, conversation_id="c", boundaries={"user_start": begin}, save=False))
    assert report.restore_failed
    assert device_of(one).followed == [1] * early
    found = one.engine._cache.match("default", prompt[:begin], begin)
    assert found.position == begin, "the turn cannot be asked again from where it began"


@EARLY
def test_the_engine_counts_what_its_requests_report(bench: Make, stored: FakeSnapshots, early: bool) -> None:
    one = make(bench, stored, early)
    device_of(one).damaged = True
    prompt = next_prompt(*range(20, 30))
    report = report_of(ask(one, prompt, conversation_id="c", save=False))
    assert (report.prefilled_tokens, report.recomputed_tokens) == (len(prompt), (len(prompt) - HELD) * early)
    stats = one.engine.stats()
    assert (stats.prefilled_tokens, stats.recomputed_tokens) == (report.prefilled_tokens, report.recomputed_tokens)


def test_an_abort_meanwhile_reports_nothing_restored(bench: Make, stored: FakeSnapshots) -> None:
    one = make(bench, stored, early=True)
    start(one)
    stats = one.engine.stats()
    assert (stats.running, stats.restoring, stats.waiting) == (1, 0, 0)
    one.engine.abort("r")
    output = one.run()["r", 0]
    report = report_of(output)
    assert (report.restored_tokens, report.tier, output.cached_tokens) == (0, None, 0)
    device_of(one).there.set()
    one.settle()
    assert one.engine.stats().prefix_hit_tokens == 0


@EARLY
def test_what_was_computed_while_the_store_was_asked_is_used(bench: Make, stored: FakeSnapshots, early: bool) -> None:
    one = make(bench, stored, early)
    service = one.snapshots
    assert service is not None
    asked, find = threading.Event(), service.find

    def slowly(query: RestoreQuery) -> Fetched | Miss:
        service.answer = None
        assert asked.wait(patience.SECONDS)
        return find(query)

    second = next_prompt(52)
    third = [*second, *oracle(second, NEW), 60, 61]
    service.answer = slowly
    one.engine.add_request("r", third, SamplingParams(max_tokens=NEW), turn=TurnSpec(conversation_id="c"))
    company = TurnSpec(conversation_id="c", save=False, restore=False)
    one.engine.add_request("s", second, SamplingParams(max_tokens=NEW), turn=company)
    got = Collector()
    while ("s", 0) not in got.finished:
        for output in one.engine.step():
            got.add(output)
    device_of(one).soon = 0.0  # nobody follows the copy
    asked.set()
    output = one.run()["r", 0]
    assert output.token_ids == oracle(third, NEW)
    report = report_of(output)
    assert (report.restored_tokens, report.prefilled_tokens) == (len(third) - 3, 3)
