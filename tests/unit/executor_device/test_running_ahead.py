"""The engine over an executor that takes a step before the last one's results were read: same answers, nothing extra.

The device may run a step when it is submitted or as late as when it is collected, so both extremes are tried.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.executor.plan import CacheGeometry, StepPlan, StepResult
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import VOCAB, FakeExecutor, digest_of, oracle

PROMPT = [3, 1, 4, 1, 5, 9]


class Late(FakeExecutor):
    """A device that runs a step when its results are asked for."""

    def __init__(self, sizes: CacheGeometry, *, max_tokens: int = 1 << 30) -> None:
        super().__init__(sizes, max_tokens=max_tokens)
        self.steps_ahead = 1
        self.most_ahead = 0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.most_ahead = max(self.most_ahead, len(self.plans))


class Early(FakeExecutor):
    """A device that runs a step as soon as it gets it."""

    def __init__(self, sizes: CacheGeometry, *, max_tokens: int = 1 << 30) -> None:
        super().__init__(sizes, max_tokens=max_tokens)
        self.steps_ahead = 1
        self.results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.results.append(super().collect())

    def collect(self) -> StepResult:
        return self.results.popleft()


@pytest.fixture(params=[Late, Early])
def device(request: pytest.FixtureRequest) -> type[FakeExecutor]:
    kind: type[FakeExecutor] = request.param
    return kind


def test_a_step_is_submitted_before_the_last_one_is_collected() -> None:
    one = Bench(executor=Late)
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=10))
    assert one.run()["r", 0].token_ids == oracle(PROMPT, 10)
    assert isinstance(one.executor, Late)
    assert one.executor.most_ahead == 2


def test_a_length_is_known_ahead_and_costs_no_step(device: type[FakeExecutor]) -> None:
    one = Bench(executor=device)
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=10))
    one.run()
    assert one.executor.rows_seen == len(PROMPT) + 9


def test_the_token_past_a_stop_is_neither_delivered_nor_kept(device: type[FakeExecutor]) -> None:
    one = Bench(executor=device, snapshots=True)
    expected = oracle(PROMPT, 20)
    stop = expected[6]
    length = expected.index(stop) + 1
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=20, stop_token_ids=[stop]), turn=TurnSpec())
    output = one.run()["r", 0]
    assert output.token_ids == expected[:length]
    one.after(100.0)
    assert one.snapshots is not None
    (capture,) = (c for c in one.snapshots.saved if c.boundary == "turn_end")
    assert capture.position == len(PROMPT) + length - 1
    assert list(capture.token_ids) == PROMPT + expected[: length - 1]
    assert list(capture.pending_ids) == [stop]
    # What the next request finds is what the capture holds, not the stop token that a step ahead has fed.
    following = PROMPT + expected[:length] + [7, 7]
    one.engine.add_request("next", following, SamplingParams(max_tokens=3))
    output = one.run()["next", 0]
    assert output.cached_tokens == len(following) - 3
    assert output.token_ids == oracle(following, 3)


@pytest.mark.parametrize("cut", [0, 1, 6])
def test_states_are_exact_at_a_turns_end_although_hybrids_run_ahead(device: type[FakeExecutor], cut: int) -> None:
    """The step that went past the end wrote to another slot: the next turn starts from the state before it."""
    one = Bench(executor=device, states=8, snapshots=True)
    expected = oracle(PROMPT, 20)
    stop = expected[cut]
    length = expected.index(stop) + 1
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=20, stop_token_ids=[stop]), turn=TurnSpec())
    assert one.run()["r", 0].token_ids == expected[:length]
    if isinstance(one.executor, Late) and length > 1:
        assert one.executor.most_ahead == 2
    one.after(100.0)
    assert one.snapshots is not None
    (capture,) = (c for c in one.snapshots.saved if c.boundary == "turn_end")
    assert capture.position == len(PROMPT) + length - 1
    following = PROMPT + expected[:length] + [7, 7]
    one.engine.add_request("next", following, SamplingParams(max_tokens=3))
    output = one.run()["next", 0]
    assert output.cached_tokens == len(following) - 3
    assert output.token_ids == oracle(following, 3)


def test_without_a_second_slot_for_everybody_nobody_runs_ahead() -> None:
    one = Bench(executor=Late, states=3)
    expected = oracle(PROMPT, 12)
    for name in ("a", "b"):
        one.engine.add_request(name, PROMPT, SamplingParams(max_tokens=12))
    done = one.run()
    assert all(done[name, 0].token_ids == expected for name in ("a", "b"))
    assert isinstance(one.executor, Late)
    assert one.executor.most_ahead == 1
    assert one.engine.stats().states_used == 0


def test_parallel_sequences_wait_for_a_prompt_that_is_under_way(device: type[FakeExecutor]) -> None:
    one = Bench(executor=device)
    prompt = list(range(30))
    one.engine.add_request("r", prompt, SamplingParams(max_tokens=4, n=3))
    done = one.run()
    assert all(done["r", index].token_ids == oracle(prompt, 4) for index in range(3))
    assert one.executor.rows_seen == len(prompt) + 2 + 3 * 3


def test_a_warm_up_in_chunks_ends_when_its_last_chunk_has_run(device: type[FakeExecutor]) -> None:
    one = Bench(executor=device, snapshots=True, budget=8)
    tokens = list(range(20))
    one.engine.add_warm("w", tokens, TurnSpec(conversation_id="c", turn_number=1))
    outputs = []
    for _ in range(20):
        outputs += one.engine.step()
    assert len(outputs) == 1
    assert one.snapshots is not None
    one.after(100.0)
    assert [capture.position for capture in one.snapshots.saved] == [20]
    assert one.executor.read_kv(one.snapshots.saved[0].block_ids, 19, 1)[0, 0, 0, 0, 0] == digest_of(tokens)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "step", "step", "abort"]), st.integers(0, 5), st.integers(1, 3)), max_size=60
)


def storm(one: Bench, actions: list[tuple[str, int, int]], longest: int, stops: slice) -> None:
    """Requests of up to `longest` tokens come and go; half of them end at one of their tokens `stops`, if it comes."""
    prompts: dict[str, list[int]] = {}
    outputs = []
    for number, (action, which, count) in enumerate(actions):
        if action == "add":
            prompt = [which] * 5 + [number % VOCAB] * (1 + which)
            prompts[f"r{number}"] = prompt
            ends = oracle(prompt, longest)[stops] if which % 2 else []
            params = SamplingParams(max_tokens=longest, n=count, stop_token_ids=ends)
            one.engine.add_request(f"r{number}", prompt, params)
        elif action == "abort" and prompts:
            one.engine.abort(list(prompts)[which % len(prompts)])
        else:
            outputs += one.engine.step()
        one.engine.check_integrity()
    outputs += one.run().values()
    for output in outputs:
        expected = oracle(prompts[output.request_id], longest)
        assert output.token_ids == expected[: len(output.token_ids)]
        if output.finish_reason == "length":
            assert len(output.token_ids) == longest
    assert one.engine.stats().blocks_used == 0
    assert one.engine.stats().states_used == 0


@given(ACTIONS, st.sampled_from([Late, Early]), st.booleans(), st.sampled_from([0, 30, 1000]))
def test_storms_give_right_answers_and_leak_nothing(
    actions: list[tuple[str, int, int]], device: type[FakeExecutor], recurrent: bool, swap: int
) -> None:
    one = Bench(blocks=10, window=32, seqs=3, budget=8, states=8 if recurrent else 0, swap=swap, executor=device)
    storm(one, actions, 8, slice(4, 6))
