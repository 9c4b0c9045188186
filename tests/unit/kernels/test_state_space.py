"""Mamba2 scan and single-step update against the plain recurrence in fp64 and against transformers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from engram_kernels import Ops
from engram_kernels.state_update.rounding import stored
from tests.unit.kernels.steps import make_step, relative_rms, replay

OPS = Ops.bind("cpu", torch.float32)
NAN = float("nan")
UNLIMITED = (0.0, float("inf"))


@dataclass
class Layer:
    A: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor

    @classmethod
    def random(cls, heads):
        return cls(-torch.rand(heads) * 15 - 0.5, torch.randn(heads), torch.randn(heads))


def random_inputs(n, heads, dim, groups, state, dtype=torch.float32):
    """x, dt, B, C of one sequence."""
    shapes = [(n, heads, dim), (n, heads), (n, groups, state), (n, groups, state)]
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def softplus64(x):
    return x.clamp_min(0) + torch.log1p((-x.abs()).exp())


def recurrence64(inputs, layer, initial, dt_limit=UNLIMITED):
    """Token by token: returns y [n, H, P] and the final state [H, P, N]."""
    x, dt, B, C = (t.double() for t in inputs)
    heads, groups = x.shape[1], B.shape[1]
    state = initial.double().clone()
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for h in range(heads):
            g = h // (heads // groups)
            step = softplus64(dt[t, h] + layer.dt_bias[h].double()).clamp(*dt_limit)
            state[h] = state[h] * (step * layer.A[h].double()).exp() + step * torch.outer(x[t, h], B[t, g])
            y[t, h] = state[h] @ C[t, g] + layer.D[h].double() * x[t, h]
    return y, state


def run_in_chunks(lengths, heads, dim, groups, state, chunk_size, rng, dtype=torch.float32, dt_limit=UNLIMITED):
    """Each sequence through the two ops, as a model slices a step."""
    layer = Layer.random(heads)
    inputs = [random_inputs(n, heads, dim, groups, state, dtype) for n in lengths]
    oracle = [recurrence64(one, layer, torch.zeros(heads, dim, state), dt_limit) for one in inputs]
    state_slots = rng.sample(range(len(lengths) + 2), len(lengths))
    pool = torch.full((len(lengths) + 2, 2, heads, dim, state), NAN)
    got, expected = [], []
    for meta, tokens in replay(lengths, rng, max_chunk=3 * chunk_size, state_slots=state_slots):
        x, dt, B, C = (torch.stack([inputs[s][i][p] for s, p in tokens]) for i in range(4))
        n = meta.decode_tokens
        parts = (layer.D, layer.dt_bias, pool[:, 1])
        if n:
            got.append(OPS.state_update(x[:n], dt[:n], layer.A, B[:n], C[:n], *parts, meta.decodes(), dt_limit))
        if n < len(tokens):
            got.append(
                OPS.ssd_scan(x[n:], dt[n:], layer.A, B[n:], C[n:], *parts, meta.prefills(), chunk_size, dt_limit)
            )
        expected.extend(oracle[s][0][p] for s, p in tokens)
    unused = [slot for slot in range(pool.shape[0]) if slot not in state_slots]
    assert bool(pool[:, 0].isnan().all())
    assert bool(pool[unused].isnan().all())
    states = pool[state_slots, 1], torch.stack([final for _, final in oracle])
    return torch.cat(got), torch.stack(expected), *states


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_random_chunks_of_mixed_batches(groups):
    got, expected, state, expected_state = run_in_chunks([1, 8, 9, 40], 4, 6, groups, 5, 8, random.Random(groups))
    assert relative_rms(got, expected) < 1e-6
    assert relative_rms(state, expected_state) < 1e-6


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=3),
    groups=st.integers(1, 2),
    per_group=st.integers(1, 2),
    dim=st.integers(1, 5),
    state=st.integers(1, 5),
    chunk_size=st.integers(1, 16),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_chunking(lengths, groups, per_group, dim, state, chunk_size, seed):
    torch.manual_seed(seed)
    got, expected, final, expected_final = run_in_chunks(
        lengths, groups * per_group, dim, groups, state, chunk_size, random.Random(seed)
    )
    assert relative_rms(got, expected) < 1e-5
    assert relative_rms(final, expected_final) < 1e-5


def test_bf16_inputs_keep_an_fp32_state():
    got, expected, state, expected_state = run_in_chunks(
        [30, 12], 4, 8, 2, 8, 8, random.Random(5), dtype=torch.bfloat16
    )
    assert got.dtype == torch.bfloat16
    assert relative_rms(got, expected) < 5e-3
    assert relative_rms(state, expected_state) < 1e-6


def test_dt_is_clamped_after_softplus():
    got, expected, *_ = run_in_chunks([20], 4, 4, 1, 4, 8, random.Random(2), dt_limit=(0.4, 0.9))
    assert relative_rms(got, expected) < 1e-6


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
def test_chunk_size_does_not_change_the_result(ops, chunk_size):
    layer = Layer.random(4)
    x, dt, B, C = random_inputs(33, 4, 6, 2, 5)
    initial = torch.randn(4, 6, 5)
    state = initial[None].clone()
    y = ops.ssd_scan(x, dt, layer.A, B, C, layer.D, layer.dt_bias, state, make_step([33], [40]), chunk_size)
    expected, final = recurrence64((x, dt, B, C), layer, initial)
    assert relative_rms(y, expected) < 1e-6
    assert relative_rms(state[0], final) < 1e-6


def test_a_token_that_forgets_everything_does_not_spoil_later_ones(ops):
    """Its huge log-decay stays in the prefix sums, from which small differences are then taken."""
    layer = Layer(torch.tensor([-20.0]), torch.zeros(1), torch.zeros(1))
    x, dt, B, C = random_inputs(64, 1, 4, 1, 4)
    dt.fill_(-6.0)
    dt[3] = 5000.0
    state = torch.zeros(1, 1, 4, 4)
    y = ops.ssd_scan(x, dt, layer.A, B, C, layer.D, layer.dt_bias, state, make_step([64], [64]), 64)
    expected, final = recurrence64((x, dt, B, C), layer, torch.zeros(1, 4, 4))
    assert relative_rms(y[4:], expected[4:]) < 1e-6
    assert relative_rms(state[0], final) < 1e-6


def test_scan_agrees_with_transformers(ops):
    layer = Layer.random(4)
    x, dt, B, C = random_inputs(37, 4, 6, 2, 5)
    initial = torch.randn(4, 6, 5)
    expected, final = mamba2_chunk_scan(
        x[None], dt[None], layer.A, B[None], C[None], 16, D=layer.D, dt_bias=layer.dt_bias,
        initial_states=initial[None], dt_softplus=True, return_final_states=True,
    )  # fmt: skip
    state = initial[None].clone()
    y = ops.ssd_scan(x, dt, layer.A, B, C, layer.D, layer.dt_bias, state, make_step([37], [60]), 16)
    assert torch.allclose(y, expected[0], atol=1e-4, rtol=1e-4)
    assert torch.allclose(state, final, atol=1e-4, rtol=1e-4)


def test_update_agrees_with_transformers(ops):
    heads, dim, groups, size = 4, 6, 2, 5
    layer = Layer.random(heads)
    x, dt, B, C = random_inputs(3, heads, dim, groups, size)
    state = torch.randn(3, heads, dim, size)
    hf_state = state.clone()
    expected = mamba2_selective_state_update(
        hf_state,
        x,
        dt[..., None].expand(-1, -1, dim),
        layer.A[:, None, None].expand(-1, dim, size),
        B,
        C,
        layer.D[:, None].expand(-1, dim),
        dt_bias=layer.dt_bias[:, None].expand(-1, dim),
        dt_softplus=True,
    )
    meta = make_step([1, 1, 1], [5, 2, 9], state_slots=[0, 1, 2])
    y = ops.state_update(x, dt, layer.A, B, C, layer.D, layer.dt_bias, state, meta)
    assert torch.allclose(y, expected, atol=1e-5)
    assert torch.allclose(state, hf_state, atol=1e-5)


def test_new_sequences_ignore_what_their_slots_held(ops):
    layer = Layer.random(2)
    x, dt, B, C = random_inputs(6, 2, 3, 1, 4)
    dirty, clean = torch.full((2, 2, 3, 4), NAN), torch.zeros(2, 2, 3, 4)
    meta = make_step([2, 4], [2, 4], state_slots=[1, 0])
    outputs = [ops.ssd_scan(x, dt, layer.A, B, C, layer.D, layer.dt_bias, state, meta, 4) for state in (dirty, clean)]
    assert torch.equal(*outputs)
    assert torch.equal(dirty, clean)


def test_a_half_precision_state_is_rounded_once_per_step(ops):
    layer = Layer.random(2)
    x, dt, B, C = random_inputs(1, 2, 3, 1, 4)
    initial = torch.randn(1, 2, 3, 4).bfloat16()
    exact, rounded = initial.float(), initial.clone()
    meta = make_step([1], [5])
    args = (x, dt, layer.A, B, C, layer.D, layer.dt_bias)
    assert torch.equal(ops.state_update(*args, exact, meta), ops.state_update(*args, rounded, meta))
    assert torch.equal(stored(exact, meta.seq_lens, torch.bfloat16), rounded)


def test_a_half_precision_state_is_rounded_to_nearest_once_per_chunk(ops):
    """Two sequences, one that begins and one that goes on, whose chunks are several of the scan's."""
    layer = Layer.random(2)
    x, dt, B, C = random_inputs(50, 2, 3, 1, 4)
    pool = torch.full((4, 2, 3, 4), NAN).bfloat16()
    pool[2] = torch.randn(2, 3, 4)
    exact, rounded = pool.float(), pool.clone()
    meta = make_step([20, 30], [20, 77], state_slots=[1, 2])
    args = (x, dt, layer.A, B, C, layer.D, layer.dt_bias)
    assert torch.equal(ops.ssd_scan(*args, exact, meta, 8), ops.ssd_scan(*args, rounded, meta, 8))
    assert torch.equal(exact[1:3].bfloat16(), rounded[1:3])
    assert bool(rounded[[0, 3]].isnan().all())


def test_empty_steps_change_nothing(ops):
    layer = Layer.random(2)
    x, dt, B, C = random_inputs(0, 2, 3, 1, 4)
    state = torch.randn(1, 2, 3, 4)
    before = state.clone()
    meta = make_step([], [])
    args = (x, dt, layer.A, B, C, layer.D, layer.dt_bias, state, meta)
    assert ops.ssd_scan(*args, 8).shape == (0, 2, 3)
    assert ops.state_update(*args).shape == (0, 2, 3)
    assert torch.equal(state, before)
