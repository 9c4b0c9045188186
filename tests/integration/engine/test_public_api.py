"""The public classes on a real (tiny) checkpoint: signatures, refusals, progress, streams."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import engram_runtime
from engram_runtime import LLM, AsyncLLMEngine, ContinuousBatchingEngine, SamplingParams, TextGenerator
from engram_runtime.errors import CheckpointError
from tests.integration.engine.conftest import Tiny

Get = Callable[[str], Tiny]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = ["hello world", "The capital of France", "yes"]


@pytest.fixture
def path(tiny: Get) -> str:
    return str(tiny("llama").path)


def test_every_public_name_exists() -> None:
    for name in engram_runtime.__all__:
        assert getattr(engram_runtime, name) is not None
    assert set(engram_runtime.__all__) <= set(dir(engram_runtime))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = engram_runtime.Nonsense


def test_importing_the_package_imports_no_torch() -> None:
    code = "import engram_runtime, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_llm_generates_in_order_and_streams_the_same(path: str) -> None:
    with LLM(path, max_seq_len=128, max_gpu_num_blocks=1024, progress=False) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [o.finish_reason for o in outputs] == ["length"] * 3
        assert all(o.delta == o.text for o in outputs)
        streamed = ["", "", ""]
        for deltas in llm.stream(PROMPTS, GREEDY):
            streamed = [text + delta for text, delta in zip(streamed, deltas, strict=True)]
        assert streamed == [o.text for o in outputs]
        by_ids = llm.generate([llm.tokenizer.encode(p) for p in PROMPTS], GREEDY)
        assert [o.token_ids for o in by_ids] == [o.token_ids for o in outputs]
        each = llm.generate(PROMPTS[:2], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3, logprobs=1)])
        assert [len(o.token_ids) for o in each] == [8, 3]
        assert len(each[1].logprobs or []) == 3


def test_llm_of_a_hybrid_with_states_in_bf16(tiny: Get) -> None:
    hybrid = str(tiny("granite_dense").path)
    sizes = {"max_seq_len": 128, "max_gpu_num_blocks": 1024, "max_num_seqs": 2}
    texts = []
    for dtype in ("bfloat16", "float32", "bfloat16"):
        with LLM(hybrid, progress=False, state_dtype=dtype, **sizes) as llm:  # type: ignore[arg-type]
            caches = llm._engine._engine.executor._caches  # type: ignore[attr-defined]
            assert str(caches.ssm.dtype) == f"torch.{dtype}"
            texts.append([output.token_ids for output in llm.generate(PROMPTS, GREEDY)])
    assert texts[0] == texts[2]


def test_a_stream_that_is_left_early_frees_its_requests(path: str) -> None:
    with LLM(path, max_seq_len=128, max_gpu_num_blocks=1024, progress=False) as llm:
        stream = llm.stream(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        stream.close()
        assert len(llm.generate("yes", GREEDY)) == 1


def test_a_batch_with_one_bad_prompt_runs_nothing(path: str) -> None:
    with LLM(path, max_seq_len=32, max_gpu_num_blocks=256, progress=False) as llm:
        with pytest.raises(ValueError, match="prompt has"):
            llm.generate(["yes", "no " * 100], GREEDY)
        with pytest.raises(ValueError, match="params must be one or as many"):
            llm.generate(PROMPTS, [GREEDY])
        with pytest.raises(ValueError, match="images"):
            llm.generate(PROMPTS, GREEDY, images=[])  # type: ignore[arg-type]
        assert len(llm.generate("yes", GREEDY)) == 1


def test_text_generator_gives_texts(path: str) -> None:
    generator = TextGenerator(path, max_seq_len=64, max_gpu_num_blocks=512, progress=False)
    texts = generator.generate(PROMPTS, GREEDY)
    streamed = ["", "", ""]
    for deltas in generator.stream(PROMPTS, GREEDY):
        streamed = [text + delta for text, delta in zip(streamed, deltas, strict=True)]
    assert streamed == texts
    generator.shutdown()


def test_continuous_batching_takes_requests_at_any_time(path: str) -> None:
    with ContinuousBatchingEngine.from_pretrained(
        path, max_seq_len=128, max_gpu_num_blocks=1024, max_num_seqs=4, progress=False
    ) as engine:
        first = engine.add_request(PROMPTS[0], GREEDY)
        engine.step()
        second = engine.add_request(None, GREEDY, prompt_token_ids=[5, 6, 7])
        dropped = engine.add_request(PROMPTS[2], SamplingParams(max_tokens=90), request_id="mine")
        assert dropped == "mine"
        engine.step()
        engine.abort("mine")
        reasons: dict[str, str] = {}
        while engine.has_unfinished_requests():
            reasons |= {o.request_id: o.finish_reason for o in engine.step() if o.finish_reason}
        assert reasons == {first: "length", second: "length", "mine": "abort"}


async def test_async_engine_from_pretrained(path: str) -> None:
    async with AsyncLLMEngine.from_pretrained(path, max_seq_len=64, max_gpu_num_blocks=512, progress=False) as engine:
        assert engine.max_model_len == 64
        assert engine.vocab_size == 512
        assert engine.snapshots is None
        text = await engine.generate_text("hello", GREEDY)
        outputs = [o async for o in engine.generate("hello", GREEDY)]
        assert outputs[-1].text == text


@pytest.mark.parametrize("kind", [AsyncLLMEngine, ContinuousBatchingEngine])
def test_every_engine_takes_several_steps_a_launch(path: str, kind: Any) -> None:
    with pytest.raises(ValueError, match=r"^decode_steps_per_launch=2 cannot be honoured"):
        kind.from_pretrained(path, decode_steps_per_launch=2, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cuda_graph": True}, "use_cuda_graph"),
        ({"decode_steps_per_launch": 9}, "decode_steps_per_launch must be 1 to 8"),
        ({"decode_steps_per_launch": 2}, "decode_steps_per_launch=2 cannot be honoured"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"quantization": "int8"}, "quantization"),
        ({"state_dtype": "float16"}, "state_dtype"),
        ({"state_dtype": "bfloat16"}, "state_dtype bfloat16 cannot be honoured"),
        ({"device": "tpu"}, "device"),
        ({"max_seq_len": 1 << 20}, "max_model_len"),
        ({"max_seq_len": 512, "max_gpu_num_blocks": 256}, "kv_cache_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_construction(
    path: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{message}"):
        LLM(path, progress=False, **options)  # type: ignore[arg-type]


def test_a_missing_checkpoint_is_named() -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM("nowhere", progress=False)


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bars_can_be_switched_off(path: str, progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(path, max_seq_len=64, max_gpu_num_blocks=512, progress=progress) as llm:
        llm.generate("yes", GREEDY)
    shown = capsys.readouterr().err
    assert ("loading weights" in shown) == progress
    assert ("generating" in shown) == progress
