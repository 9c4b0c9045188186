"""A request that starts while its prefix is still copied: the same answers, and nothing of it if it was unsound."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import FakeSnapshots, oracle
from tests.unit.engine.restoring import (
    FIRST,
    HELD,
    NEW,
    Copying,
    Waiting,
    ask,
    device_of,
    next_prompt,
    report_of,
    start,
    until_copies,
)

Make = Callable[..., Bench]


@pytest.fixture(params=[Copying, Waiting])
def kind(request: pytest.FixtureRequest) -> type[Copying]:
    found: type[Copying] = request.param
    return found


def test_it_starts_while_the_rest_is_copied(
    bench: Make, states: int, stored: FakeSnapshots, kind: type[Copying]
) -> None:
    one = bench(states=states, store=stored, executor=kind)
    output = ask(one, next_prompt(52))  # which would hang if it were waited for: nothing arrives before the step
    assert device_of(one).followed == [1]
    report = report_of(output)
    assert (report.restored_tokens, report.prefilled_tokens) == (HELD, 4)
    assert (report.tier, report.conversation_id, report.turn_number) == ("disk", "c", 2)
    assert report.bytes > 0
    assert not report.restore_failed
    assert one.executor.rows_seen == 4 + NEW - 1
    stats = one.engine.stats()
    assert stats.restored_tokens == {"disk": HELD}
    assert len(stats.restore_seconds) == 1
    assert stats.restoring == 0


def test_its_prefix_can_be_found_afterwards(
    bench: Make, states: int, stored: FakeSnapshots, kind: type[Copying]
) -> None:
    """Also by those who leave it inside the block in which the restored tokens end and the new ones begin."""
    one = bench(states=states, store=stored, executor=kind)
    ask(one, next_prompt(52))
    for tail in (60, 61):
        report = report_of(ask(one, [*FIRST, *oracle(FIRST, NEW), tail, 62]))
        assert report.tier == "gpu"
        assert report.restored_tokens >= HELD
    assert device_of(one).followed == [1]


@pytest.mark.parametrize("tail", [(52,), tuple(range(20, 40))], ids=["short", "several chunks"])
def test_what_was_computed_from_damaged_bytes_is_computed_again(
    bench: Make, states: int, stored: FakeSnapshots, kind: type[Copying], tail: tuple[int, ...]
) -> None:
    one = bench(states=states, store=stored, executor=kind, budget=16)
    device = device_of(one)
    device.damaged = True
    prompt = next_prompt(*tail)
    report = report_of(ask(one, prompt))
    assert device.followed == [1]
    assert report.restore_failed
    assert "damaged" in (report.restore_error or "")
    assert (report.restored_tokens, report.prefilled_tokens) == (0, len(prompt))
    assert report.recomputed_tokens > 0  # what was thrown away
    assert report.tier is None
    one.after(1.0)
    stats = one.engine.stats()
    assert (stats.restore_failures, stats.restored_tokens, stats.prefix_hit_tokens) == (1, {}, 0)
    assert (stats.blocks_used, stats.states_used) == (0, 0)
    # Nothing of it can be found: the next one starts from what was computed again, or its answer would differ.
    device.damaged = False
    assert report_of(ask(one, next_prompt(70, 71))).tier == ("disk" if states else "gpu")


def test_nobody_else_waits_for_a_copy(bench: Make, states: int, stored: FakeSnapshots) -> None:
    one = bench(states=states, store=stored, executor=Copying)
    device = device_of(one)
    one.engine.add_request("other", [4, 5], SamplingParams(max_tokens=120))
    one.engine.step()
    one.engine.add_request("r", next_prompt(52), SamplingParams(max_tokens=NEW), turn=TurnSpec())
    until_copies(one, 1)
    one.engine.step()
    assert one.engine.stats().restoring == 1
    device.there.set()
    done = one.run()
    assert done["r", 0].token_ids == oracle(next_prompt(52), NEW)
    assert done["other", 0].token_ids == oracle([4, 5], 120)
    assert device.followed == []


def test_of_two_that_are_restored_none_starts_early(bench: Make, states: int, stored: FakeSnapshots) -> None:
    one = bench(states=states, store=stored, executor=Copying)
    device = device_of(one)
    for name in "ab":
        prompt = next_prompt(ord(name) - 40)
        one.engine.add_request(name, prompt, SamplingParams(max_tokens=NEW), turn=TurnSpec(candidates=(HELD,)))
    until_copies(one, 2)
    one.engine.step()
    device.there.set()
    done = one.run()
    for name in "ab":
        assert done[name, 0].token_ids == oracle(next_prompt(ord(name) - 40), NEW)
    assert device.followed == []


@pytest.mark.parametrize("damaged", [False, True])
def test_an_abort_meanwhile_keeps_nothing(bench: Make, states: int, stored: FakeSnapshots, damaged: bool) -> None:
    one = bench(states=states, store=stored, executor=Copying)
    device_of(one).damaged = damaged
    start(one)
    one.engine.abort("r")
    assert one.run()["r", 0].finish_reason == "abort"
    device_of(one).there.set()
    one.settle()
    stats = one.engine.stats()
    assert (stats.blocks_used, stats.states_used) == (0, 0)
    device_of(one).damaged = False
    ask(one, next_prompt(52))


@pytest.mark.parametrize("damaged", [False, True])
def test_who_comes_meanwhile_is_served_with_it(bench: Make, states: int, stored: FakeSnapshots, damaged: bool) -> None:
    one = bench(states=states, store=stored, executor=Copying)
    device_of(one).damaged = damaged
    start(one)
    one.engine.add_request("other", next_prompt(52), SamplingParams(max_tokens=9))
    one.engine.add_request("third", [8, 9], SamplingParams(max_tokens=9), priority=-1)
    done = one.run()
    assert done["r", 0].token_ids == oracle(next_prompt(52), NEW)
    assert done["other", 0].token_ids == oracle(next_prompt(52), 9)
    assert done["third", 0].token_ids == oracle([8, 9], 9)
    assert report_of(done["r", 0]).restore_failed == damaged


@pytest.mark.parametrize("seed", range(40))
def test_storms(bench: Make, states: int, stored: FakeSnapshots, kind: type[Copying], seed: int) -> None:
    """Requests that come and go at any time, too little memory, restores of which some are damaged."""
    rng = random.Random(seed)
    one = bench(
        states=states, store=stored, executor=kind, blocks=rng.choice((14, 24)), window=56, budget=rng.choice((8, 32)),
        swap=rng.choice((0, 1 << 20)), seqs=3,
    )  # fmt: skip
    device = device_of(one)
    device.soon = 0.001
    asked: dict[str, tuple[list[int], int]] = {}
    done: dict[str, RequestOutput] = {}
    aborted: set[str] = set()
    for number in range(12):
        device.damaged = rng.random() < 0.4
        name = f"r{number}"
        prompt = next_prompt(*(rng.randrange(90) for _ in range(rng.randrange(1, 9))))
        asked[name] = prompt, rng.randrange(1, 9)
        if rng.random() < 0.5:  # what the GPU tier has is forgotten
            for pool in (one.engine._cache.blocks, one.engine._cache.states):
                pool.release(pool.allocate(pool.available) or [])
        params = SamplingParams(max_tokens=asked[name][1])
        one.engine.add_request(name, prompt, params, turn=TurnSpec(save=False), priority=rng.randrange(2))
        for _ in range(rng.choice((0, 1, 3, 12))):
            for output in one.engine.step():
                if output.finished:
                    done[output.request_id] = output
            one.engine.check_integrity()
            if one.engine.idle:
                one.engine.wait(0.005)
        if rng.random() < 0.2:
            one.engine.abort(name)
            aborted.add(name)
    done |= {name: output for (name, _), output in one.run().items()}
    assert set(done) == set(asked)
    for name, (prompt, count) in asked.items():
        if done[name].finish_reason == "abort":
            assert name in aborted
        else:
            assert done[name].token_ids == oracle(prompt, count), name
    one.settle()
    assert one.engine.stats().blocks_used == 0
    assert one.engine.stats().states_used == 0
