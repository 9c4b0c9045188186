"""Cache sizes: what was asked is held or refused by name, what was left open is derived from the model and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engram_kernels import Ops
from engram_runtime.executor.memory import CACHE_SHARE, CacheRequest, allocate_caches, free_memory, plan_caches
from engram_runtime.executor.transfer import CacheTransfer, state_layout
from engram_runtime.models.spec import ModelSpec, StateSpec
from engram_runtime.snapshots.types import TensorSpec

DENSE = ModelSpec(
    architecture="llama",
    dtype="float32",
    vocab_size=100,
    hidden_size=8,
    num_layers=2,
    layer_types=("attention", "attention"),
    num_q_heads=2,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=1024,
    state=None,
    rope=None,
    config={},
)
STATE = StateSpec(num_layers=1, ssm_shape=(2, 4, 8), conv_shape=(6, 3), chunk_size=16)
HYBRID = replace(DENSE, layer_types=("mamba", "attention"), state=STATE)
PURE = replace(DENSE, layer_types=("mamba", "mamba"), state=STATE)
GIB = 1 << 30
TOKEN = 2 * 2 * 2 * 4 * 4  # planes, layers, heads, dim, bytes


def test_everything_open_serves_the_whole_window_for_everybody() -> None:
    geometry = plan_caches(DENSE, CacheRequest(max_num_seqs=4), GIB)
    assert geometry.max_model_len == 1024
    assert geometry.num_blocks == 4 * 64
    assert geometry.kv_bytes_per_token == TOKEN
    assert not geometry.has_state


def test_little_memory_shortens_the_window_that_nobody_asked_for() -> None:
    free = int(10 * 16 * TOKEN / CACHE_SHARE)
    geometry = plan_caches(DENSE, CacheRequest(max_num_seqs=4), free)
    assert (geometry.num_blocks, geometry.max_model_len) == (10, 160)


def test_a_window_that_was_asked_for_is_not_shortened() -> None:
    free = int(10 * 16 * TOKEN / CACHE_SHARE)
    with pytest.raises(ValueError, match=r"^max_model_len must be <= 160"):
        plan_caches(DENSE, CacheRequest(max_num_seqs=4, max_model_len=512), free)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (CacheRequest(4, max_model_len=2048), "max_model_len must be <= 1024"),
        (CacheRequest(4, max_model_len=512, kv_cache_tokens=256), "kv_cache_tokens must hold"),
        (CacheRequest(4, kv_cache_tokens=GIB), "kv_cache_tokens ask"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(request_: CacheRequest, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        plan_caches(DENSE, request_, GIB)


def test_a_small_cache_that_was_asked_for_bounds_an_open_window() -> None:
    geometry = plan_caches(DENSE, CacheRequest(4, kv_cache_tokens=250), GIB)
    assert (geometry.num_blocks, geometry.max_model_len) == (15, 240)


def test_states_run_and_are_kept() -> None:
    geometry = plan_caches(HYBRID, CacheRequest(4, state_slots=5, checkpoint_slots=7), GIB)
    assert geometry.num_state_slots == 12
    assert geometry.state_bytes == STATE.bytes()
    derived = plan_caches(HYBRID, CacheRequest(4), GIB)
    assert derived.num_state_slots > 2 * 4


def test_states_in_bf16_take_less_and_more_of_them_are_kept() -> None:
    half = HYBRID.with_state_dtype("bfloat16")
    assert HYBRID.state_bytes() - half.state_bytes() == 2 * 4 * 8 * 2
    assert half.with_state_dtype("float32") == HYBRID
    tight = 1 << 16
    plain, smaller = (plan_caches(spec, CacheRequest(2, 32, 64), tight) for spec in (HYBRID, half))
    assert smaller.state_bytes == half.state_bytes()
    assert smaller.num_state_slots > plain.num_state_slots
    caches = allocate_caches(half, smaller, torch.device("cpu"))
    assert caches.ssm is not None
    assert caches.conv is not None
    assert (caches.ssm.dtype, caches.conv.dtype) == (torch.bfloat16, torch.float32)
    assert state_layout(half).states["ssm"] == TensorSpec((1, 2, 4, 8), "bfloat16")
    assert state_layout(half).state_bytes == half.state_bytes()


def test_a_state_of_another_dtype_is_refused_and_not_converted() -> None:
    half = HYBRID.with_state_dtype("bfloat16")
    caches = allocate_caches(half, plan_caches(half, CacheRequest(2, 64, 256), GIB), torch.device("cpu"))
    transfer = CacheTransfer(Ops.bind("cpu", torch.float32), caches)
    state = {name: torch.ones_like(tensor) for name, tensor in transfer.read_state(0).items()}
    with pytest.raises(ValueError, match=r"^ssm must be torch\.bfloat16, got torch\.float32"):
        transfer.write_state(0, {**state, "ssm": state["ssm"].float()})
    assert not bool(transfer.read_state(0)["conv"].any())
    transfer.write_state(0, state)
    assert all(bool((tensor == 1).all()) for tensor in transfer.read_state(0).values())


def test_a_model_without_attention_has_blocks_that_cost_nothing() -> None:
    geometry = plan_caches(PURE, CacheRequest(4), GIB)
    assert geometry.kv_bytes_per_token == 0
    assert geometry.max_model_len == 1024


@pytest.mark.parametrize("spec", [DENSE, HYBRID, PURE])
def test_caches_have_the_planned_shapes(spec: ModelSpec) -> None:
    geometry = plan_caches(spec, CacheRequest(2, 64, 256), GIB)
    caches = allocate_caches(spec, geometry, torch.device("cpu"))
    assert len(caches.kv) == spec.num_attention_layers
    assert all(kv.shape == (2, geometry.num_blocks, 2, 16, 4) for kv in caches.kv)
    if spec.state is None:
        assert caches.ssm is None
    else:
        assert caches.ssm is not None
        assert caches.conv is not None
        assert caches.ssm.shape == (geometry.num_state_slots, 1, 2, 4, 8)
        assert caches.conv.shape == (geometry.num_state_slots, 1, 6, 3)


def test_free_memory_is_a_plausible_number() -> None:
    free: Any = free_memory(torch.device("cpu"))
    assert 1 << 20 < free < 1 << 50
