"""The device executor's logic on the CPU: a request gets what the host's executor gives it, however it is sampled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.outputs import Collector, RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.executor.device import executor as executors
from engram_runtime.executor.device.executor import DeviceExecutor
from engram_runtime.executor.plan import RowOpen, RowSampling, SequencePlan, StepPlan
from engram_runtime.layers import last_tokens
from tests.support.device_step import load_tiny, make_executor
from tests.support.tiny import make_tiny

Get = Callable[[str], Any]
STYLES = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=9, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, max_tokens=14, seed=-(1 << 63)),
    SamplingParams(temperature=0.0, max_tokens=10, logprobs=3, presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(temperature=0.9, max_tokens=11, seed=3, repetition_penalty=1.3, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=8, min_tokens=5, stop_token_ids=[77], logit_bias={77: 8.0, 3: -1.0}),
    SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=list(range(100, 400))),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Get]:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            family, _, dtype = name.partition(":")
            path = make_tiny(family, tmp_path_factory.mktemp(family))
            made[name] = load_tiny(path, state_dtype=dtype or "float32")
        return made[name]

    yield get
    made.clear()


def make_engine(tiny: Get, family: str, kind: str, **sizes: int) -> LLMEngine:
    model, ops = tiny(family)
    wanted = {"seqs": 5, "window": 160, "tokens": 2048, "budget": 40, "swap": 1 << 24, **sizes}
    executor = make_executor(kind, model, ops, seqs=wanted["seqs"], window=wanted["window"], tokens=wanted["tokens"])
    config = EngineConfig(
        "tiny",
        max_num_seqs=wanted["seqs"],
        max_num_batched_tokens=wanted["budget"],
        swap_bytes=wanted["swap"],
        seed=0,
        progress=False,
    )
    return LLMEngine(config, executor, vocab_size=model.spec.vocab_size, transfer=executor.transfer)


def prompts_for(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(4, 512) for _ in range(70)]
    return [
        shared[: rng.choice([0, 15, 16, 33, 70])] + [rng.randrange(4, 512) for _ in range(rng.choice([1, 5, 16, 40]))]
        for _ in range(count)
    ]


def serve(
    engine: LLMEngine, prompts: list[list[int]], styles: tuple[SamplingParams, ...] = STYLES, *, seed: int | None = None
) -> dict[str, Any]:
    """Requests of every style arriving at random times (all at once without a seed); what each got."""
    rng = random.Random(seed)
    collector = Collector()
    prompt_scores: dict[str, Any] = {}
    logprobs: dict[str, list[Any]] = {}

    def step() -> None:
        for output in engine.step():
            logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
            if output.prompt_logprobs:
                prompt_scores[output.request_id] = output.prompt_logprobs
            collector.add(output)

    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, styles[number % len(styles)])
        for _ in range(rng.choice([0, 0, 1, 4]) if seed is not None else 0):
            step()
    while engine.has_unfinished_requests:
        step()
    engine.check_integrity()
    finished: dict[tuple[str, int], RequestOutput] = collector.finished
    return {
        name: (output.token_ids, output.finish_reason, logprobs.get(name), prompt_scores.get(name))
        for (name, _), output in finished.items()
    }


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, (tokens, reason, logprobs, scores) in theirs.items():
        assert ours[name][0] == tokens, name
        assert ours[name][1] == reason
        for mine, other in ((ours[name][2], logprobs), (ours[name][3], scores)):
            assert [e and e.token_id for e in mine or ()] == [e and e.token_id for e in other or ()]
            for a, b in zip(mine or (), other or (), strict=True):
                if b is not None:
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                    assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-4)


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "recorded"), ("granite", "recorded"), ("llama", "launched")])
def test_every_style_of_sampling_in_mixed_company(tiny: Get, family: str, kind: str) -> None:
    prompts = prompts_for(1, 10)
    ours = serve(make_engine(tiny, family, kind), prompts, seed=1)
    assert_same(ours, serve(make_engine(tiny, family, "plain"), prompts, seed=1))


@pytest.mark.parametrize("kind", ["plain", "recorded", "launched"])
@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_a_last_layer_of_last_tokens_answers_as_one_of_all_tokens(
    tiny: Get, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of many tokens, whoever is sampled how, and beside one whose prompt's scores are asked for."""
    prompts = [prompt + [5] * 60 for prompt in prompts_for(4, 8)]
    with monkeypatch.context() as patch:
        patch.setattr(last_tokens, "OTHERS", 1 << 30)
        whole = serve(make_engine(tiny, family, "plain", budget=150, window=200), prompts, seed=4)
    model, _ = tiny(family)
    computed: list[int] = []
    hook = model.layers[-1].feed_forward.register_forward_pre_hook(lambda _, inputs: computed.append(len(inputs[0])))
    assert_same(serve(make_engine(tiny, family, kind, budget=150, window=200), prompts, seed=4), whole)
    hook.remove()
    assert min(computed) < max(computed)


@pytest.mark.parametrize("kind", ["recorded", "launched"])
def test_states_in_bf16(tiny: Get, kind: str) -> None:
    """They are rounded by positions, not by slots: running ahead, padding and second slots change nothing."""
    prompts = prompts_for(2, 5)
    styles = (SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=3),)
    ours = serve(make_engine(tiny, "granite_dense:bfloat16", kind), prompts, styles)
    assert_same(ours, serve(make_engine(tiny, "granite_dense:bfloat16", "plain"), prompts, styles))


def test_changes_without_room_beside_a_recorded_plan_travel_by_themselves(
    tiny: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "CHANGE_WORDS", 0)
    prompts = prompts_for(3, 6)
    ours = serve(make_engine(tiny, "granite", "recorded"), prompts, seed=3)
    assert_same(ours, serve(make_engine(tiny, "granite", "plain"), prompts, seed=3))


@pytest.mark.parametrize(
    ("family", "kind", "swap"),
    [
        ("llama", "recorded", 0),
        ("granite_dense", "recorded", 1 << 24),
        ("granite_dense:bfloat16", "recorded", 1 << 24),
        ("llama", "launched", 1 << 24),
    ],
)
def test_preemption(tiny: Get, family: str, kind: str, swap: int) -> None:
    styles = (
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, presence_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24, ignore_eos=True, seed=4),
    )
    prompts = [[7 + number] * 3 + list(range(20 + number, 40 + number)) for number in range(4)]
    sizes = {"seqs": 4, "window": 96, "tokens": 128, "swap": swap}
    engine = make_engine(tiny, family, kind, **sizes)
    ours = serve(engine, prompts, styles)
    stats = engine.stats()
    assert stats.preemptions_swapped if swap else stats.preemptions_recomputed
    assert_same(ours, serve(make_engine(tiny, family, "plain", **sizes), prompts, styles))


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_tokens_of_nobody_leave_nothing_behind(tiny: Get, family: str) -> None:
    # They are NaN here. A spare row that read one would sample nonsense, and the next step would look that up.
    model, ops = tiny(family)
    executor = make_executor("recorded", model, ops, seqs=5, window=160, tokens=2048)
    assert isinstance(executor, DeviceExecutor)
    prompt = tuple(range(10, 50))
    opened = RowOpen(2, RowSampling(temperature=0.0), prompt)
    for closes in ((), (2,)):  # a shape is recorded when it comes for the second time
        plan = StepPlan(0, (SequencePlan(2, 0, prompt, (4, 5, 6), 1, True),), opens=(opened,), closes=closes)
        executor.submit(plan)
        executor.collect()
    assert executor.recorded == 1
    assert all(kv[:, -1, :, 0].isfinite().all() for kv in executor._caches.kv)
    assert 0 <= int(executor._tables.last[-1]) < model.spec.vocab_size
