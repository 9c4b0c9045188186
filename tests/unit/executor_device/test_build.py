"""Sizes of a GPU's caches, the steps that are measured for them, and what is refused where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engram_runtime.engine import loading
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.loading import load
from engram_runtime.errors import CheckpointError
from engram_runtime.executor.device.build import heaviest_plans
from engram_runtime.executor.memory import CacheRequest, plan_caches
from tests.support.device_step import load_tiny, make_executor
from tests.support.tiny import make_tiny
from tests.unit.executor.test_memory import DENSE, GIB, HYBRID


@pytest.mark.parametrize("spec", [DENSE, HYBRID])
def test_a_filled_card_leaves_less_than_a_block(spec: object) -> None:
    request = CacheRequest(4, fill=True)
    geometry = plan_caches(spec, request, GIB)  # type: ignore[arg-type]
    block = 16 * geometry.kv_bytes_per_token
    taken = geometry.num_blocks * block + geometry.num_state_slots * geometry.state_bytes
    assert GIB - block < taken <= GIB
    asked = plan_caches(spec, replace(request, kv_cache_tokens=2048), GIB)  # type: ignore[arg-type]
    assert asked.num_blocks == 128


@pytest.mark.parametrize(("max_tokens", "seqs", "window"), [(64, 4, 128), (100, 3, 48), (5, 5, 2048)])
def test_the_heaviest_steps_are_steps(max_tokens: int, seqs: int, window: int, tmp_path: Path) -> None:
    model, ops = load_tiny(make_tiny("granite", tmp_path))
    blocks = -(-max_tokens // 16) + seqs + -(-window // 16)
    executor = make_executor("launched", model, ops, seqs=seqs, window=window, tokens=16 * blocks)
    sampled = []
    for plan in heaviest_plans(max_tokens, seqs, window, model.spec.vocab_size):
        assert plan.num_tokens <= max_tokens
        executor.submit(plan)
        sampled.append(len(executor.collect().sampled))
    assert sampled == [0, 1, seqs, seqs]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("option", [{"gpu_memory_utilization": 0.5}, {"use_cuda_graph": True}])
def test_what_needs_a_gpu_is_refused_by_name_without_one(option: dict[str, object], tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    config = EngineConfig(str(path), progress=False, **option)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"^{next(iter(option))}"):
        load(config)


TOGETHER = r"^decode_steps_per_launch=4 cannot be honoured"


def without_weights(family: str, path: Path) -> EngineConfig:
    """Four steps a launch of a checkpoint whose weights cannot be read."""
    make_tiny(family, path)
    for file in path.glob("*.safetensors"):
        file.write_bytes(b"no weights")
    return EngineConfig(str(path), progress=False, decode_steps_per_launch=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_steps_together_are_refused_without_a_gpu_before_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=TOGETHER):
        load(without_weights("qwen3", tmp_path))


@pytest.mark.parametrize(
    ("family", "error", "message"), [("granite", ValueError, TOGETHER), ("qwen3", CheckpointError, "safetensors")]
)
def test_steps_together_are_refused_for_recurrent_state_before_weights_are_read(
    family: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps can be recorded; a dense model comes as far as its weights."""
    monkeypatch.setattr(loading, "why_not_recorded", lambda *_: None)
    with pytest.raises(error, match=message):
        load(without_weights(family, tmp_path))
