"""The engine's promises to a caller: right tokens, right ends, honest refusals, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.errors import CapacityError
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import VOCAB, Letters, oracle

Make = Callable[..., Bench]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def text_of(tokens: list[int]) -> str:
    return Letters().decode(tokens, skip_special_tokens=True)


def test_tokens_texts_and_counts(bench: Make) -> None:
    one = bench()
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=6))
    output = one.run()["r", 0]
    assert output.token_ids == oracle(PROMPT, 6)
    assert output.text == text_of(oracle(PROMPT, 6))
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert (output.prompt_tokens, output.cached_tokens) == (8, 0)
    # One token is sampled and never forwarded.
    assert one.executor.rows_seen == len(PROMPT) + 6 - 1


def test_deltas_join_to_the_text(bench: Make) -> None:
    one = bench()
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=9, logprobs=0))
    outputs: list[RequestOutput] = []
    while one.engine.has_unfinished_requests:
        outputs += one.engine.step()
    assert "".join(o.delta for o in outputs) == outputs[-1].text
    assert [t for o in outputs for t in o.new_token_ids] == outputs[-1].token_ids
    assert [len(o.logprobs or []) for o in outputs] == [1] * 9
    assert [o.finished for o in outputs] == [False] * 8 + [True]


def test_the_same_prompt_again_computes_one_token_of_it(bench: Make) -> None:
    one = bench()
    for name in ("a", "b"):
        one.engine.add_request(name, PROMPT, SamplingParams(max_tokens=4))
        output = one.run()[name, 0]
    assert output.cached_tokens == len(PROMPT) - 1
    assert output.token_ids == oracle(PROMPT, 4)
    stats = one.engine.stats()
    assert stats.prefilled_tokens == len(PROMPT) + 1
    assert stats.prefix_hit_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("length", [4, 8, 16])
def test_a_cached_prompt_that_ends_at_a_blocks_edge_still_has_a_query(bench: Make, length: int) -> None:
    # nano-vllm #144: a full-prompt hit with length a multiple of the block gave a query of length zero.
    one = bench()
    prompt = [(7 * i) % 11 for i in range(length)]
    for name in ("a", "b", "c"):
        one.engine.add_request(name, prompt, SamplingParams(max_tokens=3))
        assert one.run()[name, 0].token_ids == oracle(prompt, 3)


def test_preemption_with_prefix_hits_keeps_tokens_right(bench: Make) -> None:
    # nano-vllm #211 and #233: a preempted sequence that comes back to a prefix hit broke the block table.
    for swap in (0, 1 << 20):
        one = bench(blocks=8, window=32, seqs=4, budget=16, swap=swap)
        for number in range(6):
            one.engine.add_request(f"r{number}", [1, 2, 3, 4, 5, number % 2], SamplingParams(max_tokens=14))
        done = one.run()
        for number in range(6):
            assert done[f"r{number}", 0].token_ids == oracle([1, 2, 3, 4, 5, number % 2], 14)
        stats = one.engine.stats()
        assert stats.preemptions_swapped if swap else stats.preemptions_recomputed
        assert not swap or stats.recomputed_tokens == 0


def test_prompts_of_one_token_and_of_the_whole_window(bench: Make) -> None:
    one = bench(window=16, blocks=4, seqs=1)
    one.engine.add_request("short", [5], SamplingParams(max_tokens=100))
    one.engine.add_request("long", list(range(15)), SamplingParams())
    done = one.run()
    assert done["short", 0].token_ids == oracle([5], 15)
    assert done["long", 0].token_ids == oracle(list(range(15)), 1)
    assert done["long", 0].finish_reason == "length"


def test_requests_that_can_never_fit_are_refused_at_once(bench: Make) -> None:
    one = bench(window=16, blocks=4, seqs=1)
    with pytest.raises(CapacityError, match="prompt has 16 tokens"):
        one.engine.add_request("r", list(range(16)), SamplingParams())
    assert issubclass(CapacityError, ValueError)
    assert not one.engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt must hold"),
        ([VOCAB], SamplingParams(), "prompt holds 97"),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias holds token id 97"),
        ([1], SamplingParams(stop_token_ids=[200]), "stop_token_ids holds token id 200"),
    ],
)
def test_what_the_model_does_not_have_is_refused(
    bench: Make, prompt: list[int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bench().engine.add_request("r", prompt, params)


def test_boundaries_and_candidates_are_checked(bench: Make) -> None:
    engine = bench().engine
    for turn, message in (
        (TurnSpec(boundaries={"history": 8}), "history must be between 0 and 7"),
        (TurnSpec(boundaries={"turn_end": 3}), "boundaries may name"),
        (TurnSpec(candidates=(9,)), "candidates"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add_request("r", PROMPT, SamplingParams(), turn=turn)


def test_a_request_id_in_use_is_refused(bench: Make) -> None:
    engine = bench().engine
    engine.add_request("r", PROMPT, SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("r", PROMPT, SamplingParams())


def test_end_of_sequence_stops_and_is_not_shown(bench: Make) -> None:
    tokens = oracle(PROMPT, 10)
    one = bench(eos=frozenset({tokens[4]}))
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=10))
    output = one.run()["r", 0]
    assert output.token_ids == tokens[:5]
    assert output.text == text_of(tokens[:4])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on(bench: Make) -> None:
    tokens = oracle(PROMPT, 10)
    one = bench(eos=frozenset({tokens[4]}))
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=10, ignore_eos=True))
    assert one.run()["r", 0].token_ids == tokens


def test_stop_token_ids_name_the_reason(bench: Make) -> None:
    tokens = oracle(PROMPT, 10)
    one = bench()
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=10, stop_token_ids=[tokens[3]]))
    output = one.run()["r", 0]
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[3])
    assert output.token_ids == tokens[:4]


def test_stop_strings_across_token_edges_are_cut(bench: Make) -> None:
    tokens = oracle(PROMPT, 12)
    stop = text_of(tokens[5:8])
    one = bench()
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=12, stop=[stop]))
    one.engine.add_request("s", PROMPT, SamplingParams(max_tokens=12, stop=stop, include_stop_str_in_output=True))
    done = one.run()
    assert done["r", 0].text == text_of(tokens[:5])
    assert (done["r", 0].finish_reason, done["r", 0].stop_reason) == ("stop", stop)
    assert done["s", 0].text == text_of(tokens[:8])


def test_min_tokens_holds_back_stops_but_not_the_caps(bench: Make) -> None:
    tokens = oracle(PROMPT, 12)
    one = bench(window=20)
    stop = text_of(tokens[1:3])
    one.engine.add_request("r", PROMPT, SamplingParams(min_tokens=6, max_tokens=9, stop=[stop]))
    assert one.run()["r", 0].token_ids == tokens[:9]
    one.engine.add_request("cap", PROMPT, SamplingParams(min_tokens=50))
    assert len(one.run()["cap", 0].token_ids) == 12


def test_parallel_sequences_share_the_prompt(bench: Make) -> None:
    for states in (0, 12):
        one = bench(states=states)
        one.engine.add_request("r", PROMPT, SamplingParams(n=3, max_tokens=4))
        done = one.run()
        assert sorted(index for _, index in done) == [0, 1, 2]
        assert all(output.token_ids == oracle(PROMPT, 4) for output in done.values())
        # The prompt once, its last token for each of the other two, and 3 forwarded tokens each.
        assert one.executor.rows_seen == len(PROMPT) + 2 + 3 * 3


def test_prompt_logprobs_are_computed_even_when_the_prompt_is_cached(bench: Make) -> None:
    one = bench(budget=5)
    one.engine.add_request("a", PROMPT, SamplingParams(max_tokens=2))
    one.run()
    one.engine.add_request("b", PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=0))
    output = one.run()["b", 0]
    assert output.cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [(e.token_id, e.logprob) for e in output.prompt_logprobs[1:] if e] == [
        (token, -float(position)) for position, token in enumerate(PROMPT) if position
    ]


def test_prompt_logprobs_survive_a_preemption(bench: Make) -> None:
    one = bench(blocks=8, window=32, seqs=3, budget=8, swap=0)
    for number in range(3):
        prompt = [number, *range(9)]
        one.engine.add_request(f"r{number}", prompt, SamplingParams(max_tokens=14, prompt_logprobs=0))
    done = one.run()
    assert one.engine.stats().preemptions_recomputed > 0
    for number in range(3):
        logprobs = done[f"r{number}", 0].prompt_logprobs
        assert logprobs is not None
        assert [entry is None for entry in logprobs] == [True] + [False] * 9


def test_aborted_requests_end_and_say_so(bench: Make) -> None:
    one = bench()
    one.engine.add_request("r", PROMPT, SamplingParams(n=2, max_tokens=50))
    for _ in range(3):
        one.engine.step()
    one.engine.abort("r")
    one.engine.abort("unknown")
    done = one.run()
    assert [done["r", index].finish_reason for index in (0, 1)] == ["abort", "abort"]
    assert done["r", 0].text == text_of(done["r", 0].token_ids)


def test_statistics_add_up(bench: Make) -> None:
    one = bench()
    for number in range(3):
        one.engine.add_request(f"r{number}", [number, *PROMPT], SamplingParams(max_tokens=4))
    one.clock.now += 1
    one.run()
    stats = one.engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (27, 12)
    assert stats.finished == {"length": 3}
    assert (len(stats.ttft_seconds), len(stats.itl_seconds), len(stats.e2e_seconds)) == (3, 9, 3)
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert one.engine.stats().ttft_seconds == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "step", "abort"]), st.integers(0, 5), st.integers(1, 3), st.booleans()),
        max_size=60,
    ),
    st.booleans(),
    st.sampled_from([0, 30, 1000]),
)
def test_storms_of_aborts_leak_nothing(actions: list[tuple[str, int, int, bool]], recurrent: bool, swap: int) -> None:
    one = Bench(blocks=10, window=32, seqs=3, budget=8, states=8 if recurrent else 0, swap=swap)
    alive: list[str] = []
    for number, (action, which, count, warm) in enumerate(actions):
        if action == "add":
            prompt = [which] * 5 + [number % VOCAB] * (1 + which)
            name = f"r{number}"
            if warm:
                one.engine.add_warm(name, prompt, TurnSpec())
            else:
                one.engine.add_request(name, prompt, SamplingParams(max_tokens=8, n=count))
            alive.append(name)
        elif action == "abort" and alive:
            one.engine.abort(alive[which % len(alive)])
        else:
            one.engine.step()
        one.engine.check_integrity()
    one.run()
    assert one.engine.stats().blocks_used == 0
    assert one.engine.stats().states_used == 0
