"""More of an early start: what it holds, what it is reported to have had, and who is gone when its copy is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.sequence import Status
from engram_runtime.engine.turns import TurnSpec
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import FakeSnapshots, oracle
from tests.unit.engine.restoring import (
    FIRST,
    HELD,
    NEW,
    Copying,
    ask,
    device_of,
    next_prompt,
    report_of,
    start,
    until_copies,
)

Make = Callable[..., Bench]


def test_its_step_copies_no_page_that_is_still_to_come(bench: Make, states: int, stored: FakeSnapshots) -> None:
    """A step waits for the layers of a restore where they are used, which is after its copies of blocks."""
    one = bench(states=states, store=stored, executor=Copying)
    start(one)
    (plan,) = device_of(one).plans
    assert plan.block_copies == ()
    assert HELD % one.engine._cache.block_size, "no block is shared by what comes and what is computed"
    assert one.run()["r", 0].token_ids == oracle(next_prompt(52), NEW)


def test_what_the_device_had_is_what_counts_after_damage(bench: Make) -> None:
    """As it does for a request that has waited: the prefix that it began with is forgotten."""
    first = bench(snapshots=True)
    ask(first, FIRST, conversation_id="c")
    first.after(1.0)
    assert first.snapshots is not None
    one = bench(store=first.snapshots, executor=Copying)
    one.engine.add_request("before", FIRST[:8], SamplingParams(max_tokens=1))
    one.run()
    device_of(one).damaged = True
    prompt = next_prompt(52)
    report = report_of(ask(one, prompt))
    assert device_of(one).followed == [1]
    assert report.restore_failed
    assert (report.restored_tokens, report.prefilled_tokens, report.tier) == (8, len(prompt) - 8, "gpu")
    assert report.conversation_id != "c", "what it is told to go on from did not arrive"
    assert one.engine.stats().prefix_hit_tokens == 8


def test_a_prefix_that_came_before_there_was_room_is_kept(bench: Make, states: int, stored: FakeSnapshots) -> None:
    one = bench(states=states, store=stored, executor=Copying, blocks=24)
    device, pool = device_of(one), one.engine._cache.blocks
    one.engine.add_request("r", next_prompt(52), SamplingParams(max_tokens=NEW), turn=TurnSpec())
    until_copies(one, 1)
    taken = pool.allocate(pool.available)
    assert taken is not None
    first = one.engine._requests["r"].first
    while first.arriving is None:
        one.engine.wait(0.01)
        one.engine._poll()
    one.engine.step()
    assert (first.status, device.followed) == (Status.WAITING, [])
    device.there.set()
    while first.arriving is not None:
        one.engine.wait(0.01)
        one.engine.step()
    assert first.lease is not None, "whoever needs memory next takes what was restored"
    pool.release(taken)
    output = one.run()["r", 0]
    assert output.token_ids == oracle(next_prompt(52), NEW)
    assert report_of(output).restored_tokens == HELD
    assert device.followed == []


def test_it_holds_what_it_started_from_once(bench: Make, states: int, stored: FakeSnapshots) -> None:
    """Else a preempted one would keep the memory that it was to give up."""
    one = bench(states=states, store=stored, executor=Copying)
    start(one)
    first = one.engine._requests["r"].first
    while first.arriving is not None:
        one.engine.step()
    assert first.status is Status.RUNNING
    assert not one.engine._cache._leases
    one.run()


def test_a_copy_that_takes_long_is_not_given_up_once_it_is_followed(
    bench: Make, states: int, stored: FakeSnapshots
) -> None:
    """Its step cannot be called back, and ends with it."""
    one = bench(states=states, store=stored, executor=Copying, restore_timeout_seconds=2.0)
    start(one)
    assert one.engine._restorer is not None
    one.clock.now += 60.0
    assert one.engine._restorer.next_deadline() is None, "the engine would not wait, but ask again and again"
    one.engine._poll()
    output = one.run()["r", 0]
    assert output.token_ids == oracle(next_prompt(52), NEW)
    assert report_of(output).restored_tokens == HELD
    assert one.engine.stats().restore_failures == 0


def test_an_abort_when_its_bytes_were_found_to_be_damaged(bench: Make, states: int, stored: FakeSnapshots) -> None:
    """It does not begin anew for nobody."""
    one = bench(states=states, store=stored, executor=Copying)
    device_of(one).damaged = True
    start(one)
    while not one.engine._void:
        one.engine.step()
    one.engine.abort("r")
    assert one.run()["r", 0].finish_reason == "abort"
    for _ in range(5):
        one.engine.step()
    stats = one.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.states_used) == (0, 0, 0, 0)
    assert one.engine.idle
    assert device_of(one).rows_seen <= 4 + NEW, "it was computed again"


def test_who_was_aborted_is_not_being_restored(bench: Make, states: int, stored: FakeSnapshots) -> None:
    one = bench(states=states, store=stored, executor=Copying)
    start(one)
    one.engine.abort("r")
    assert one.engine.stats().restoring == 0
    one.run()
    device_of(one).there.set()
    one.settle()
    stats = one.engine.stats()
    assert (stats.restored_tokens, stats.restore_failures, stats.blocks_used) == ({}, 0, 0)
    found = one.engine._cache.match("default", next_prompt(52), HELD)
    assert found.position == 0, "what came for nobody takes the place of what somebody left"


class Failing(Copying):
    """A restore that cannot be queued to its end: some of it is on its way."""

    settled = 0

    def write(
        self,
        block_ids: Sequence[int],
        kv: Sequence[tuple[int, Tensor]],
        state_slot: int | None,
        state: dict[str, Tensor],
    ) -> int:
        raise RuntimeError("out of memory")

    def settle(self) -> None:
        self.settled += 1


def test_what_could_not_be_queued_to_its_end_is_waited_for(bench: Make, states: int, stored: FakeSnapshots) -> None:
    """Its blocks go to others, and nothing may still write there."""
    one = bench(states=states, store=stored, executor=Failing)
    report = report_of(ask(one, next_prompt(52)))
    assert report.restore_failed
    assert "out of memory" in (report.restore_error or "")
    device = device_of(one)
    assert isinstance(device, Failing)
    assert (device.settled, device.followed) == (1, [])
