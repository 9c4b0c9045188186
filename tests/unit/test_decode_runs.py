"""The decode benchmark's runs with one and with several steps a launch: times are per token, answers the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench import bench_decode
from tests.support.device_step import load_tiny, make_executor
from tests.support.tiny import make_tiny
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import oracle
from tests.unit.executor_device.test_steps_together import LateTogether

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3, 5, 8]]
STEP_SECONDS = 0.002


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Bench]:
    """Makes an engine whose device takes `STEP_SECONDS` a step, by the benchmark's own clock."""
    now = [0.0]

    def tick() -> None:
        now[0] += STEP_SECONDS

    def make(steps: int) -> Bench:
        one = Bench(executor=LateTogether, seqs=6, decode_steps_per_launch=steps)
        one.executor.tick = tick
        return one

    monkeypatch.setattr(bench_decode, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return make


@pytest.mark.parametrize(("steps", "measured"), [(1, 27), (4, 6)])
def test_times_are_those_of_a_token(timed: Callable[[int], Bench], steps: int, measured: int) -> None:
    one = timed(steps)
    answers, intervals = bench_decode.generate(one.engine, PROMPTS, [bench_decode.greedy(30)] * 3)
    assert answers == [oracle(prompt, 30) for prompt in PROMPTS]
    assert intervals == pytest.approx([1e3 * STEP_SECONDS] * measured)
    assert one.executor.launches == ([4] * 7 if steps == 4 else [])


def test_steps_in_which_somebody_has_nothing_are_not_measured(timed: Callable[[int], Bench]) -> None:
    lengths = (14, 30, 30)
    for steps, most in ((1, 14 - 3), (4, (14 - 1) // 4 - 1)):
        params = [bench_decode.greedy(length) for length in lengths]
        answers, intervals = bench_decode.generate(timed(steps).engine, PROMPTS, params)
        assert [len(answer) for answer in answers] == list(lengths)
        assert 0 < len(intervals) <= most


def test_a_run_has_the_steps_of_the_one_that_warms_it_up_however_many_are_launched_together(
    timed: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what one has recorded serves the other, and rounding cannot differ; the prompts start one after the other."""
    monkeypatch.setattr(bench_decode, "PROMPT", 12)
    model: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=12))  # so few that first tokens drawn would meet
    runs = []
    for steps in (1, 4):
        one = timed(steps)
        for seed in (1, 2):
            one.executor.history.clear()
            bench_decode.generate(one.engine, bench_decode.prompts_for(model, 6, seed), [bench_decode.greedy(20)] * 6)
            plans = one.executor.history
            runs.append([[(work.start, work.num_tokens) for work in plan.sequences] for plan in plans])
        assert (4 in one.executor.launches) == (steps == 4)
    assert len({len(plan) for plan in runs[0]}) > 1
    assert runs[1:] == runs[:1] * 3


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A tiny dense model, and its executor, which several engines use one after the other as on a GPU."""
    model, ops = load_tiny(make_tiny("qwen3", tmp_path_factory.mktemp("qwen3")))
    return model, make_executor("recorded", model, ops, seqs=3, window=96, tokens=1024)


def test_a_second_engine_over_the_same_executor_gives_the_same_answers(device: tuple[Any, Any]) -> None:
    model, executor = device
    warm, tokens = [prompt[::-1] for prompt in PROMPTS], bench_decode.greedy(20)
    one = bench_decode.engine_over(executor, model, 3)
    bench_decode.generate(one, warm, [tokens] * 3)
    answers, _ = bench_decode.generate(one, PROMPTS, [tokens] * 3)
    four = bench_decode.engine_over(executor, model, 3, bench_decode.TOGETHER)
    assert len(bench_decode.launched_together(four, warm, PROMPTS, answers)) >= 3


def test_other_answers_are_refused(timed: Callable[[int], Bench]) -> None:
    answers = [oracle(prompt, 16) for prompt in PROMPTS]
    answers[1][15] += 1
    with pytest.raises(bench_decode.Refused, match="1 of 3 answers are others with 4 steps a launch"):
        bench_decode.launched_together(timed(4).engine, PROMPTS, PROMPTS, answers)


def test_a_run_without_launches_of_several_steps_is_refused(timed: Callable[[int], Bench]) -> None:
    answers = [oracle(prompt, 4) for prompt in PROMPTS]
    with pytest.raises(bench_decode.Refused, match="no two launches of 4 steps"):
        bench_decode.launched_together(timed(4).engine, PROMPTS, PROMPTS, answers)


def test_a_time_below_the_floor_is_refused() -> None:
    bench_decode.refuse_below(1.0, 1.0)
    with pytest.raises(bench_decode.Refused, match="below the floor"):
        bench_decode.refuse_below(1.0, 0.99)
