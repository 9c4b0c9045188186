"""The engine equals `transformers` however the work was cut, ordered, shared, swapped or started again.

The rule: teacher-forced log-probabilities within 1e-4, and the same first choice wherever the gap between the first
two exceeds 1e-3. (Comparing texts alone would fail on near-ties, since batch shapes change the last bits.)
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from tests.integration.engine.conftest import FAMILIES, Tiny, run

Get = Callable[[str], Tiny]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=20)


def assert_equal(one: Tiny, prompt: list[int], output: RequestOutput) -> None:
    """Judge one output by the rule."""
    tokens = prompt + output.token_ids
    expected = one.logprobs(tokens)[len(prompt) - 1 : -1]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == expected.shape[0]
    for row, entry in zip(expected, output.logprobs, strict=True):
        ids = torch.tensor([token for token, _ in entry.top])
        ours = torch.tensor([value for _, value in entry.top])
        assert (row[ids] - ours).abs().max() < 1e-4
        best = row.topk(2)
        if best.values[0] - best.values[1] > 1e-3:
            assert entry.token_id == int(best.indices[0])


def prompts_for(seed: int, count: int) -> list[list[int]]:
    """Prompts of all lengths, several with a common beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(4, 512) for _ in range(90)]
    prompts = []
    for number in range(count):
        own = [rng.randrange(4, 512) for _ in range(rng.choice([1, 2, 7, 16, 33, 60]))]
        prompts.append(shared[: rng.choice([0, 1, 15, 16, 17, 50, 90])] + own if number % 3 else own)
    return prompts


def stagger(engine: LLMEngine, prompts: list[list[int]], seed: int) -> dict[str, RequestOutput]:
    """Requests arrive in random order and at random times."""
    rng = random.Random(seed)
    order = list(range(len(prompts)))
    rng.shuffle(order)
    logprobs: dict[str, list[object]] = {}
    done: dict[str, RequestOutput] = {}

    def step() -> None:
        for output in engine.step():
            logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
            if output.finished:
                output.logprobs[:] = logprobs[output.request_id]  # type: ignore[index]
                done[output.request_id] = output

    for number in order:
        engine.add_request(f"r{number}", prompts[number], GREEDY)
        for _ in range(rng.choice([0, 0, 1, 5])):
            step()
    while engine.has_unfinished_requests:
        step()
    engine.check_integrity()
    return done


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_random_chunks_orders_and_prefix_hits(tiny: Get, family: str, seed: int) -> None:
    one = tiny(family)
    rng = random.Random(seed)
    engine = one.engine(seqs=rng.choice([2, 4, 8]), budget=rng.choice([9, 17, 64]), window=192)
    prompts = prompts_for(seed, 8)
    done = stagger(engine, prompts, seed)
    for number, prompt in enumerate(prompts):
        assert_equal(one, prompt, done[f"r{number}"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("swap", [0, 1 << 24], ids=["recompute", "swap"])
def test_preemption(tiny: Get, family: str, swap: int) -> None:
    one = tiny(family)
    engine = one.engine(seqs=4, budget=32, window=96, tokens=128, swap=swap)
    prompts = [[7 + number] * 3 + list(range(20 + number, 40 + number)) for number in range(4)]
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, GREEDY)
    done = run(engine)
    stats = engine.stats()
    assert stats.preemptions_swapped if swap else stats.preemptions_recomputed
    if swap:
        assert stats.recomputed_tokens == 0
    elif one.model.spec.state is not None:
        assert stats.recomputed_tokens > 0  # a dense model may find its own blocks still cached
    for number, prompt in enumerate(prompts):
        assert_equal(one, prompt, done[f"r{number}", 0])
    assert sum(one.rows) == stats.prefilled_tokens + stats.recomputed_tokens + 4 * (24 - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_repeated_and_extended_prompts(tiny: Get, family: str) -> None:
    # Full-prompt hits at and beside a block's edge, then a conversation that extends what was generated.
    one = tiny(family)
    engine = one.engine()
    for length in (15, 16, 17, 32):
        prompt = list(range(30, 30 + length))
        for name in ("first", "again"):
            engine.add_request(name, prompt, GREEDY)
            output = run(engine)[name, 0]
            assert_equal(one, prompt, output)
        following = prompt + output.token_ids + [9, 9]
        before = sum(one.rows)
        engine.add_request("next", following, GREEDY)
        output = run(engine)["next", 0]
        assert_equal(one, following, output)
        # The last generated token was never forwarded, so it is computed with the two new ones.
        assert output.cached_tokens == len(following) - 3
        assert sum(one.rows) - before == 3 + 24 - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_parallel_sequences(tiny: Get, family: str) -> None:
    one = tiny(family)
    engine = one.engine()
    prompt = list(range(50, 91))
    engine.add_request("r", prompt, SamplingParams(n=3, temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=20))
    done = run(engine)
    for index in range(3):
        assert_equal(one, prompt, done["r", index])
    assert sum(one.rows) == len(prompt) + 2 + 3 * 5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [9, 64])
def test_prompt_logprobs(tiny: Get, family: str, budget: int) -> None:
    one = tiny(family)
    engine = one.engine(budget=budget)
    prompt = list(range(60, 99))
    engine.add_request("cached", prompt, GREEDY)
    run(engine)
    engine.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=5))
    output = run(engine)["r", 0]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    expected = one.logprobs(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:], 1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert abs(entry.logprob - float(expected[position - 1, prompt[position]])) < 1e-4
        best = expected[position - 1].topk(5)
        assert torch.allclose(torch.tensor([value for _, value in entry.top]), best.values, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_sampling_does_not_depend_on_the_company(tiny: Get, family: str) -> None:
    one = tiny(family)
    prompt = list(range(70, 95))
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=1234, max_tokens=20, ignore_eos=True)
    engine = one.engine()
    engine.add_request("alone", prompt, params)
    alone = run(engine)["alone", 0]
    crowded = one.engine(seqs=4, budget=11, window=96, tokens=160, swap=0)
    for number in range(5):
        crowded.add_request(f"r{number}", [5, 6, 7 + number] * 4, GREEDY)
    crowded.add_request("among", prompt, params)
    assert run(crowded)["among", 0].token_ids == alone.token_ids


def test_penalties_and_bias_follow_openai(tiny: Get) -> None:
    one = tiny("llama")
    engine = one.engine()
    prompt = list(range(40, 60))
    engine.add_request("biased", prompt, SamplingParams(temperature=0.0, max_tokens=4, logit_bias={77: 100.0}))
    assert run(engine)["biased", 0].token_ids == [77] * 4
    engine.add_request(
        "varied",
        prompt,
        SamplingParams(temperature=0.0, max_tokens=4, logit_bias={77: 12.0, 78: 11.0}, presence_penalty=2.0),
    )
    assert run(engine)["varied", 0].token_ids[:2] == [77, 78]


def test_end_of_sequence_cannot_come_before_min_tokens(tiny: Get) -> None:
    one = tiny("llama")
    engine = one.engine()
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=5, stop_token_ids=[77], logit_bias={77: 100.0})
    engine.add_request("r", list(range(40, 60)), params)
    output = run(engine)["r", 0]
    assert 77 not in output.token_ids[:5]
    assert output.token_ids[5] == 77
    assert (output.finish_reason, output.stop_reason) == ("stop", 77)
