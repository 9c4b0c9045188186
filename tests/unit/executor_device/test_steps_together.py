"""Several decodes in one launch while nobody waits: the same answers, and nobody waits for more than was launched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.outputs import Collector
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.executor.plan import CacheGeometry
from tests.support.device_step import load_tiny, make_executor
from tests.support.tiny import make_tiny
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import FakeExecutor, oracle
from tests.unit.executor_device.test_against_the_host_executor import STYLES, assert_same, prompts_for, serve
from tests.unit.executor_device.test_running_ahead import ACTIONS, Early, Late, storm

PROMPT = [3, 1, 4, 1, 5, 9]


class LateTogether(Late):
    def __init__(self, sizes: CacheGeometry, *, max_tokens: int = 1 << 30) -> None:
        super().__init__(sizes, max_tokens=max_tokens)
        self.steps_together = 8


class EarlyTogether(Early):
    def __init__(self, sizes: CacheGeometry, *, max_tokens: int = 1 << 30) -> None:
        super().__init__(sizes, max_tokens=max_tokens)
        self.steps_together = 8


@pytest.fixture(params=[LateTogether, EarlyTogether])
def device(request: pytest.FixtureRequest) -> type[FakeExecutor]:
    kind: type[FakeExecutor] = request.param
    return kind


def test_a_lonely_answer_comes_in_few_launches(device: type[FakeExecutor]) -> None:
    one = Bench(executor=device, decode_steps_per_launch=4)
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=22))
    assert one.run()["r", 0].token_ids == oracle(PROMPT, 22)
    assert one.executor.launches == [4] * 5  # the first token is the prompt's; the length is known, so none is lost
    assert one.executor.rows_seen == len(PROMPT) + 21


def test_the_length_of_the_shortest_answer_bounds_a_launch(device: type[FakeExecutor]) -> None:
    one = Bench(executor=device, decode_steps_per_launch=8)
    other = [2, 7, 1, 8, 2, 8]
    one.engine.add_request("a", PROMPT, SamplingParams(max_tokens=4))
    one.engine.add_request("b", other, SamplingParams(max_tokens=13))
    done = one.run()
    assert done["a", 0].token_ids == oracle(PROMPT, 4)
    assert done["b", 0].token_ids == oracle(other, 13)
    assert one.executor.rows_seen == len(PROMPT) + len(other) + 3 + 12
    assert one.executor.launches == [8]  # when nobody ends in it, and never a part: each length is a recording


def test_who_comes_meanwhile_waits_for_what_was_launched_and_no_longer(device: type[FakeExecutor]) -> None:
    one = Bench(executor=device, decode_steps_per_launch=4)
    one.engine.add_request("long", PROMPT, SamplingParams(max_tokens=60))
    for _ in range(6):
        one.engine.step()
    before = len(one.executor.launches)
    one.engine.add_request("new", [7, 7, 7], SamplingParams(max_tokens=3))
    first = next(steps for steps in range(1, 9) if any(output.request_id == "new" for output in one.engine.step()))
    assert first <= 3
    assert len(one.executor.launches) <= before + 2
    done = one.run()
    assert done["new", 0].token_ids == oracle([7, 7, 7], 3)
    assert done["long", 0].token_ids == oracle(PROMPT, 60)


def test_nothing_past_a_stop_is_delivered_or_kept(device: type[FakeExecutor]) -> None:
    one = Bench(executor=device, snapshots=True, decode_steps_per_launch=5)
    expected = oracle(PROMPT, 20)
    stop = expected[6]
    length = expected.index(stop) + 1
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=20, stop_token_ids=[stop]), turn=TurnSpec())
    assert one.run()["r", 0].token_ids == expected[:length]
    one.after(100.0)
    assert one.snapshots is not None
    (capture,) = (c for c in one.snapshots.saved if c.boundary == "turn_end")
    assert list(capture.token_ids) == PROMPT + expected[: length - 1]
    assert list(capture.pending_ids) == [stop]
    following = PROMPT + expected[:length] + [7, 7]
    one.engine.add_request("next", following, SamplingParams(max_tokens=3))
    assert one.run()["next", 0].token_ids == oracle(following, 3)


@given(ACTIONS, st.sampled_from([LateTogether, EarlyTogether]), st.integers(2, 8), st.sampled_from([0, 30, 1000]))
def test_storms_give_right_answers_and_leak_nothing(
    actions: list[tuple[str, int, int]], device: type[FakeExecutor], together: int, swap: int
) -> None:
    one = Bench(blocks=12, window=40, seqs=3, budget=8, swap=swap, executor=device, decode_steps_per_launch=together)
    storm(one, actions, 14, slice(6, 9))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tiny(make_tiny("qwen3", tmp_path_factory.mktemp("qwen3")))


def engine_of(model: Any, ops: Any, kind: str, together: int, **sizes: int) -> LLMEngine:
    executor = make_executor(kind, model, ops, seqs=5, window=160, tokens=2048)
    config = EngineConfig(
        "tiny", max_num_seqs=5, max_num_batched_tokens=40, seed=0, progress=False, decode_steps_per_launch=together
    )
    return LLMEngine(config, executor, vocab_size=model.spec.vocab_size, transfer=executor.transfer)


@pytest.mark.parametrize("together", [2, 5, 8])
def test_every_style_of_sampling_in_recorded_launches(dense: Any, together: int) -> None:
    styles = (*STYLES, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    prompts = prompts_for(4, len(styles))
    engine = engine_of(*dense, "recorded", together)
    executor: Any = engine.executor
    launched: list[int] = []
    submit: Callable[[Any], None] = executor.submit_together
    executor.submit_together = lambda plans: (launched.append(len(plans)), submit(plans))[1]
    ours = serve(engine, prompts, styles, seed=4)
    assert max(launched) == together
    assert_same(ours, serve(engine_of(*dense, "plain", 1), prompts, styles, seed=4))


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "plain"), ("qwen3", "launched"), ("granite", "recorded")])
def test_what_cannot_be_honoured_is_refused(family: str, kind: str, tmp_path: Path) -> None:
    model, ops = load_tiny(make_tiny(family, tmp_path))
    with pytest.raises(ValueError, match="decode_steps_per_launch=2 cannot be honoured"):
        engine_of(model, ops, kind, 2)
    engine_of(model, ops, kind, 1).close()


@pytest.mark.parametrize("value", [0, 9])
def test_the_number_is_checked(value: int) -> None:
    with pytest.raises(ValueError, match="decode_steps_per_launch must be 1 to 8"):
        EngineConfig("m", decode_steps_per_launch=value)


def test_who_has_ended_in_what_was_launched_is_not_preempted(device: type[FakeExecutor]) -> None:
    """A restore takes the last blocks while a launch is under way, in which an answer ends: it is a turn all the same,
    and what it held is enough for the other one."""
    one = Bench(executor=device, snapshots=True, blocks=12, seqs=2, swap=0, decode_steps_per_launch=6)
    expected = oracle([2, 7, 1, 8, 2, 8], 24)
    length = next(n for n in range(4, 8) if expected[n - 1] not in expected[: n - 1])
    stop = [expected[length - 1]]
    one.engine.add_request("a", PROMPT, SamplingParams(max_tokens=24), turn=TurnSpec(conversation_id="a"))
    params = SamplingParams(max_tokens=24, stop_token_ids=stop)
    one.engine.add_request("b", [2, 7, 1, 8, 2, 8], params, turn=TurnSpec(conversation_id="b"))
    collector = Collector()
    while not one.executor.launches:
        for output in one.engine.step():
            collector.add(output)
    cache = one.engine._cache
    blocks = cache.blocks.allocate(cache.blocks.available)
    assert blocks is not None
    assert len(blocks) > 0
    lease = cache.adopt(blocks)
    for output in one.engine.step():
        collector.add(output)
    one.engine.check_integrity()
    lease.release()
    done = {**collector.finished, **one.run()}
    assert done["a", 0].token_ids == oracle(PROMPT, 24)
    assert done["b", 0].token_ids == expected[:length]
    assert one.engine.stats().preemptions_recomputed == 0
    one.after(100.0)
    assert one.snapshots is not None
    assert sorted(c.conversation_id for c in one.snapshots.saved if c.boundary == "turn_end") == ["a", "b"]
    one.engine.close()


def test_what_a_swapped_answer_had_on_the_host_is_dropped_before_a_launch(device: type[FakeExecutor]) -> None:
    one = Bench(executor=device, blocks=8, seqs=2, window=40, decode_steps_per_launch=4)
    one.engine.add_request("a", PROMPT, SamplingParams(max_tokens=26))
    one.engine.add_request("b", [2, 7, 1, 8, 2, 8], SamplingParams(max_tokens=26))
    while not one.engine.stats().swapped:
        one.engine.step()
    one.engine.abort("b")
    before = len(one.executor.launches)
    assert one.run()["a", 0].token_ids == oracle(PROMPT, 26)
    assert len(one.executor.launches) > before
    assert not one.executor.swapped
