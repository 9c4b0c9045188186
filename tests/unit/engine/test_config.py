"""An option that cannot be honoured is refused when the configuration is made, by name."""

from __future__ import annotations

from typing import Any

import pytest

from engram_runtime.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("dtype", "float8"),
        ("state_dtype", "float16"),
        ("max_model_len", 1),
        ("kv_cache_tokens", 3),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 8),
        ("state_slots", 3),
        ("checkpoint_slots", 0),
        ("swap_bytes", -1),
        ("turn_end_grace_seconds", -0.1),
        ("restore_timeout_seconds", 0.0),
        ("use_cuda_graph", True),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0.5),
        ("tensor_parallel_size", 2),
        ("quantization", "fp8"),
    ],
)
def test_a_wrong_option_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}"):
        EngineConfig(**{"model": "m", "device": "cpu", field: value})


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^device must be one of"):
        EngineConfig("m", device="tpu")


def test_what_is_off_by_default_may_be_said() -> None:
    config = EngineConfig("m", use_cuda_graph=False, tensor_parallel_size=1, quantization=None)
    assert config.max_num_seqs == 64


@pytest.mark.parametrize("option", [{"device": "cpu"}, {"use_cuda_graph": False}])
def test_steps_together_take_recorded_steps(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^decode_steps_per_launch=2 cannot be honoured"):
        EngineConfig("m", decode_steps_per_launch=2, **option)
    assert EngineConfig("m", decode_steps_per_launch=1, **option).decode_steps_per_launch == 1
    assert EngineConfig("m", decode_steps_per_launch=2).decode_steps_per_launch == 2
