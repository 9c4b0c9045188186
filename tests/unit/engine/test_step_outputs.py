"""What a step tells: the times of each output, and observations that a reader gets once a step is over."""

from __future__ import annotations

from collections.abc import Callable

from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from tests.unit.engine.conftest import Bench

NEW = 5


def outputs_of(one: Bench, seconds: float = 1.0) -> list[RequestOutput]:
    """All outputs, the clock going on by `seconds` a step."""
    found = []
    while one.engine.has_unfinished_requests:
        one.clock.now += seconds
        found += one.engine.step()
    return found


def test_outputs_carry_the_times_that_are_known_when_they_are_made(bench: Callable[..., Bench]) -> None:
    one = bench()
    began = one.clock.now
    one.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=NEW))
    metrics = [output.metrics for output in outputs_of(one)]
    assert all(m is not None and (m.arrival, m.first_token_time) == (began, began + 1) for m in metrics)
    assert [m.finish_time for m in metrics if m is not None] == [None] * (NEW - 1) + [began + NEW]


def test_sequences_of_one_request_keep_the_time_of_the_last_that_ended(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=NEW, n=2, seed=1))
    outputs = outputs_of(one)
    ends = [output for output in outputs if output.finished]
    assert {output.index for output in ends} == {0, 1}
    assert all(output.metrics is not None and output.metrics.finish_time is not None for output in ends)
    assert ends[-1].metrics is not None
    assert ends[-1].metrics.finish_time == one.clock.now


def test_an_aborted_request_says_when_it_ended(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=50))
    one.engine.step()
    one.clock.now += 7
    one.engine.abort("a")
    (last,) = one.engine.step()
    assert last.metrics is not None
    assert last.metrics.finish_time == one.clock.now
    assert last.metrics.first_token_time is not None


def test_every_token_is_observed_once_and_with_its_own_time(bench: Callable[..., Bench]) -> None:
    one = bench(seqs=3)
    for name in "abc":
        one.engine.add_request(name, [ord(name) - 90, 2, 3], SamplingParams(max_tokens=NEW))
    seen_first: list[float] = []
    seen_next: list[float] = []
    while one.engine.has_unfinished_requests:
        one.clock.now += 2
        one.engine.step()
        stats = one.engine.stats()
        seen_first += stats.ttft_seconds
        seen_next += stats.itl_seconds
    assert seen_first == [2.0] * 3
    assert seen_next == [2.0] * 3 * (NEW - 1)


def test_waiting_is_observed_when_somebody_is_admitted_and_once(bench: Callable[..., Bench]) -> None:
    one = bench(seqs=1)
    for name in "ab":
        one.engine.add_request(name, [ord(name) - 90, 2, 3], SamplingParams(max_tokens=2))
    waited: list[float] = []
    while one.engine.has_unfinished_requests:
        one.engine.step()
        waited += one.engine.stats().queue_seconds
        one.clock.now += 1
    assert waited[0] == 0.0
    assert len(waited) == 2
    assert waited[1] >= 2.0
