"""Restore as promotion: what is gained, what is moved, and every way it may fail without harm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.snapshots.types import Fetched, Miss, RestoreQuery
from tests.support import patience
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import FakeSnapshots, fetched, oracle
from tests.unit.engine.restoring import FIRST, NEW, ask, next_prompt, report_of

Make = Callable[..., Bench]


def test_another_engine_computes_only_what_is_new(bench: Make, states: int, stored: FakeSnapshots) -> None:
    one = bench(states=states, store=stored)
    output = ask(one, next_prompt(52))
    report = report_of(output)
    held = len(FIRST) + NEW - 1
    assert (report.restored_tokens, report.prefilled_tokens) == (held, 4)
    assert one.executor.rows_seen == 4 + NEW - 1
    assert report.tier == "disk"
    assert report.bytes > 0
    assert report.restore_time_ms >= 0
    assert not report.restore_failed
    assert (report.conversation_id, report.turn_number) == ("c", 2)
    assert output.cached_tokens == held
    stats = one.engine.stats()
    assert stats.restored_tokens == {"disk": held}
    assert len(stats.restore_seconds) == 1


def test_a_restored_prefix_is_an_ordinary_prefix_afterwards(bench: Make, states: int, stored: FakeSnapshots) -> None:
    one = bench(states=states, store=stored)
    ask(one, next_prompt(52))
    assert one.snapshots is not None
    queries = len(one.snapshots.queries)
    report = report_of(ask(one, [*FIRST, *oracle(FIRST, NEW), 60, 61, 62]))
    assert report.tier == "gpu"
    assert report.restored_tokens >= len(FIRST) + NEW - 1
    assert len(one.snapshots.queries) == queries + 1


def test_only_what_the_gpu_lacks_is_moved(bench: Make, states: int, stored: FakeSnapshots) -> None:
    one = bench(states=states, store=stored)
    ask(one, [*FIRST[:9], 40, 41], restore=False)
    ask(one, next_prompt(52))
    assert one.snapshots is not None
    query = one.snapshots.queries[-1]
    assert query.kv_from == 8  # two whole blocks of the common nine tokens
    # Dense models can use nine tokens as they are; a state there was never kept.
    assert query.min_position == (0 if states else 9)
    assert query.needs_state == bool(states)


def test_nothing_is_asked_when_the_gpu_has_as_much_as_there_can_be(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    assert one.snapshots is not None
    ask(one, FIRST, boundaries={"history": 10})
    asked = len(one.snapshots.queries)
    report = report_of(ask(one, FIRST, candidates=(10, 4)))
    assert len(one.snapshots.queries) == asked
    assert report.tier == "gpu"


def test_restore_can_be_declined(bench: Make, states: int, stored: FakeSnapshots) -> None:
    one = bench(states=states, store=stored)
    assert report_of(ask(one, next_prompt(52), restore=False)).restored_tokens == 0
    assert one.snapshots is not None
    assert one.snapshots.queries == []


def test_the_query_carries_the_turn(bench: Make) -> None:
    one = bench(snapshots=True)
    ask(
        one,
        FIRST,
        tenant="acme",
        conversation_id="c",
        branch_name="b",
        restore_from="f" * 32,
        candidates=(4, 2),
    )
    assert one.snapshots is not None
    query = one.snapshots.queries[0]
    assert (query.tenant, query.conversation_id, query.branch_name) == ("acme", "c", "b")
    assert (query.restore_from, query.candidates) == ("f" * 32, (4, 2))
    assert list(query.token_ids) == FIRST
    assert query.max_position == len(FIRST) - 1


def test_tenants_do_not_share_the_gpu_tier(bench: Make, states: int) -> None:
    one = bench(states=states)
    ask(one, FIRST, tenant="a", boundaries={"history": 10})
    assert report_of(ask(one, FIRST, tenant="b")).restored_tokens == 0


def change(stored: FakeSnapshots, **fields: Any) -> Callable[[RestoreQuery], Fetched | Miss]:
    """Answers with the stored turn, with some fields made wrong."""
    (entry,) = stored.stored.values()
    return lambda query: replace(fetched(*entry, kv_from=query.kv_from), **fields)


def short(stored: FakeSnapshots) -> Callable[[RestoreQuery], Fetched | Miss]:
    (entry,) = stored.stored.values()
    whole = fetched(*entry)
    return lambda query: replace(whole, kv=[(0, whole.kv[0][1][:, :, :, :5])])


def gap(stored: FakeSnapshots) -> Callable[[RestoreQuery], Fetched | Miss]:
    (entry,) = stored.stored.values()
    whole = fetched(*entry)
    packed = whole.kv[0][1]
    return lambda query: replace(whole, kv=[(0, packed[:, :, :, :4]), (6, packed[:, :, :, 6:])])


@pytest.mark.parametrize(
    ("make_answer", "words"),
    [
        (lambda stored: lambda query: Miss("the checksum of piece 3 is wrong", failed=True), "checksum"),
        (lambda stored: change(stored, position=len(next_prompt(52))), "whole prompt"),
        (short, "lacks the keys and values of token 5"),
        (gap, "lacks the keys and values of token 4"),
    ],
)
def test_what_cannot_be_used_ends_in_a_prefill_that_says_why(
    bench: Make, states: int, stored: FakeSnapshots, make_answer: Callable[[FakeSnapshots], Any], words: str
) -> None:
    one = bench(states=states, snapshots=True)
    assert one.snapshots is not None
    one.snapshots.answer = make_answer(stored)
    report = report_of(ask(one, next_prompt(52)))
    assert report.restore_failed
    assert words in (report.restore_error or "")
    assert (report.restored_tokens, report.prefilled_tokens) == (0, len(next_prompt(52)))
    assert report.tier is None
    one.after(1.0)
    assert one.engine.stats().restore_failures == 1
    assert one.engine.stats().blocks_used == 0


def test_keys_and_values_without_their_state_are_not_used(bench: Make) -> None:
    first = bench(states=16, snapshots=True)
    ask(first, FIRST)
    first.after(1.0)
    assert first.snapshots is not None
    one = bench(states=16, snapshots=True)
    assert one.snapshots is not None
    one.snapshots.answer = change(first.snapshots, state=None)
    report = report_of(ask(one, next_prompt(52)))
    assert "no recurrent state" in (report.restore_error or "")
    assert report.restored_tokens == 0


def test_a_plain_miss_is_no_failure(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    report = report_of(ask(one, FIRST))
    assert not report.restore_failed
    assert report.restore_error is None


def test_a_service_that_raises_does_not_hang_the_request(bench: Make) -> None:
    one = bench(snapshots=True)

    def broken(query: RestoreQuery) -> Fetched | Miss:
        raise OSError("disk on fire")

    assert one.snapshots is not None
    one.snapshots.answer = broken
    report = report_of(ask(one, FIRST))
    assert report.restore_error == "OSError: disk on fire"


def test_tensors_that_cannot_be_written_end_in_a_prefill(
    bench: Make, states: int, stored: FakeSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench(states=states, store=stored)

    def refuse(*_: object) -> None:
        raise ValueError("packed has another shape")

    monkeypatch.setattr(one.executor, "write_kv", refuse)
    report = report_of(ask(one, next_prompt(52)))
    assert report.restore_error == "ValueError: packed has another shape"
    one.after(1.0)
    assert one.engine.stats().blocks_used == 0
    assert one.engine.stats().states_used == 0


def test_a_full_gpu_prefills(bench: Make, stored: FakeSnapshots, states: int) -> None:
    one = bench(states=states, store=stored, blocks=8, window=32, **patience.ENGINE)
    blocker = one.engine.add_request("big", [7] * 20, SamplingParams(max_tokens=8))
    one.engine.step()
    assert blocker.first.block_ids
    # The answer is there before the engine takes another step, so the blocks are really still in use.
    one.engine.add_request("r", next_prompt(52), SamplingParams(max_tokens=NEW), turn=TurnSpec())
    one.engine.wait(patience.SECONDS)
    output = one.run()["r", 0]
    assert output.token_ids == oracle(next_prompt(52), NEW)
    assert "no free blocks" in (report_of(output).restore_error or "")


def test_other_requests_run_while_a_restore_is_under_way(bench: Make) -> None:
    one = bench(snapshots=True)
    gate = threading.Event()

    def slow(query: RestoreQuery) -> Fetched | Miss:
        gate.wait(patience.SECONDS)
        return Miss("late")

    assert one.snapshots is not None
    one.snapshots.answer = slow
    one.engine.add_request("slow", FIRST, SamplingParams(max_tokens=2), turn=TurnSpec())
    one.engine.add_request("fast", [4, 5], SamplingParams(max_tokens=3))
    outputs: list[RequestOutput] = []
    for _ in range(5):
        outputs += one.engine.step()
    assert outputs[-1].request_id == "fast"
    assert outputs[-1].finished
    assert one.engine.stats().restoring == 1
    gate.set()
    assert one.run()["slow", 0].finish_reason == "length"


def test_a_restore_that_hangs_is_given_up(bench: Make) -> None:
    one = bench(snapshots=True, restore_timeout_seconds=2.0)
    gate = threading.Event()

    def hang(query: RestoreQuery) -> Fetched | Miss:
        assert query.deadline_seconds == 2.0
        gate.wait(patience.SECONDS)
        return Miss("far too late")

    assert one.snapshots is not None
    one.snapshots.answer = hang
    one.engine.add_request("r", FIRST, SamplingParams(max_tokens=NEW), turn=TurnSpec())
    one.engine.step()
    one.after(2.5)
    output = one.run()["r", 0]
    assert output.token_ids == oracle(FIRST, NEW)
    assert "longer than 2 s" in (report_of(output).restore_error or "")
    gate.set()


def test_a_restore_gets_as_long_as_the_prefill_that_it_saves(bench: Make) -> None:
    """Prefill was seen to run at four tokens a second: 80 tokens are worth 20 s, and 12 no more than the least."""
    one = bench(snapshots=True, restore_timeout_seconds=2.0)
    assert one.snapshots is not None
    asked: list[float | None] = []
    answer = one.snapshots.answer

    def look(query: RestoreQuery) -> Fetched | Miss:
        asked.append(query.deadline_seconds)
        assert query.prefill_tokens_per_second is None, "nobody asked for slow restores to be refused"
        return Miss("nothing there") if answer is None else answer(query)

    one.snapshots.answer = look
    ask(one, [7] * 81)  # nothing was measured: the least

    def slowly() -> None:
        one.clock.now += 8.0

    one.executor.tick = slowly
    ask(one, [8] * 32, restore=False, save=False)  # one step of the whole budget, 32 tokens
    one.executor.tick = None
    ask(one, [9] * 81)
    ask(one, [10] * 6)
    assert asked == [2.0, 20.0, 2.0]


def test_a_long_restore_is_given_up_when_its_own_time_is_over(bench: Make) -> None:
    one = bench(snapshots=True, restore_timeout_seconds=2.0)
    gate = threading.Event()

    def hang(query: RestoreQuery) -> Fetched | Miss:
        gate.wait(patience.SECONDS)
        return Miss("far too late")

    assert one.snapshots is not None
    one.snapshots.answer = hang

    def slowly() -> None:
        one.clock.now += 8.0

    one.executor.tick = slowly
    ask(one, [8] * 32, restore=False, save=False)
    one.executor.tick = None
    one.engine.add_request("r", [9] * 81, SamplingParams(max_tokens=NEW), turn=TurnSpec())
    one.after(19.0)
    assert one.engine.stats().restoring == 1
    one.after(1.5)
    output = one.run()["r", 0]
    assert "longer than 20 s" in (report_of(output).restore_error or "")
    gate.set()


def test_an_abort_during_a_restore_gives_everything_back(bench: Make, states: int, stored: FakeSnapshots) -> None:
    one = bench(states=states, store=stored)
    ask(one, FIRST[:8], restore=False, save=False)
    gate, answer = threading.Event(), change(stored)

    def slow(query: RestoreQuery) -> Fetched | Miss:
        gate.wait(patience.SECONDS)
        return answer(query)

    assert one.snapshots is not None
    one.snapshots.answer = slow
    one.engine.add_request("r", next_prompt(52), SamplingParams(n=2), turn=TurnSpec())
    one.engine.step()
    one.engine.abort("r")
    done = one.run()
    assert {output.finish_reason for output in done.values()} == {"abort"}
    gate.set()
    one.settle()
    assert one.engine.stats().blocks_used == 0
    one.engine.check_integrity()


def test_restored_prefixes_of_waiting_requests_do_not_block_the_pool(
    bench: Make, states: int, stored: FakeSnapshots
) -> None:
    one = bench(states=states, store=stored, blocks=9, window=36, seqs=1)
    for number in range(4):
        prompt = [*next_prompt(52), number]
        one.engine.add_request(f"r{number}", prompt, SamplingParams(max_tokens=NEW), turn=TurnSpec())
    done = one.run()
    for number in range(4):
        assert done[f"r{number}", 0].token_ids == oracle([*next_prompt(52), number], NEW)


def test_a_measured_rate_is_passed_only_where_slow_restores_are_to_be_refused(bench: Make) -> None:
    for refuse in (False, True):
        one = bench(snapshots=True, refuse_slow_restores=refuse)
        assert one.snapshots is not None
        one.executor.tick = lambda clock=one.clock: setattr(clock, "now", clock.now + 0.01)
        ask(one, [5] * 40)
        ask(one, [6] * 40)
        rates = [query.prefill_tokens_per_second for query in one.snapshots.queries]
        assert rates[0] is None
        assert rates[1] == (pytest.approx(3200.0) if refuse else None)
