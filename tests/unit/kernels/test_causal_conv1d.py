"""Convolution with a carried window: chunking must not show, and only the addressed slots may change."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import causal_conv1d_fn, causal_conv1d_update

from engram_kernels import Ops
from tests.unit.kernels.steps import make_step, relative_rms, replay

OPS = Ops.bind("cpu", torch.float32)
NAN = float("nan")


def conv64(x, weight, bias):
    """A whole sequence x [n, C] by loops."""
    n, channels = x.shape
    width = weight.shape[1]
    out = torch.zeros(n, channels, dtype=torch.float64)
    for t in range(n):
        for tap in range(width):
            source = t - (width - 1) + tap
            if source >= 0:
                out[t] += weight[:, tap].double() * x[source].double()
    if bias is not None:
        out += bias.double()
    return out / (1 + (-out).exp())


def window_after(x, width):
    """The last width - 1 inputs, zeros before the start: [C, width - 1]."""
    padded = torch.cat((torch.zeros(width - 1, x.shape[1], dtype=x.dtype), x))
    return padded[padded.shape[0] - (width - 1) :].T


def run_in_chunks(lengths, channels, width, bias, rng, dtype=torch.float32, max_chunk=12):
    weight = torch.randn(channels, width).to(dtype)
    bias = torch.randn(channels).to(dtype) if bias else None
    x = [torch.randn(n, channels).to(dtype) for n in lengths]
    state_slots = rng.sample(range(len(lengths) + 3), len(lengths))
    pool = torch.full((len(lengths) + 3, 2, channels, width - 1), NAN, dtype=dtype)
    got, expected = [], []
    whole = [conv64(sequence, weight, bias) for sequence in x]
    for meta, tokens in replay(lengths, rng, max_chunk=max_chunk, state_slots=state_slots):
        out = OPS.causal_conv1d(torch.stack([x[s][p] for s, p in tokens]), weight, bias, pool[:, 1], meta)
        assert out.dtype == dtype
        got.extend(out)
        expected.extend(whole[s][p] for s, p in tokens)
    for s, slot in enumerate(state_slots):
        assert torch.equal(pool[slot, 1], window_after(x[s], width))
    unused = [slot for slot in range(pool.shape[0]) if slot not in state_slots]
    assert bool(pool[:, 0].isnan().all())
    assert bool(pool[unused].isnan().all())
    return torch.stack(got), torch.stack(expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_random_chunks_of_mixed_batches(bias, dtype, tolerance):
    got, expected = run_in_chunks([1, 2, 3, 4, 30], 6, 4, bias, random.Random(1), dtype)
    assert relative_rms(got, expected) < tolerance


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    channels=st.integers(1, 5),
    width=st.integers(2, 5),
    max_chunk=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_chunking(lengths, channels, width, max_chunk, seed):
    torch.manual_seed(seed)
    got, expected = run_in_chunks(lengths, channels, width, seed % 2, random.Random(seed), max_chunk=max_chunk)
    assert relative_rms(got, expected) < 1e-5


def test_agrees_with_transformers(ops):
    weight, bias, x = torch.randn(6, 4), torch.randn(6), torch.randn(11, 6)
    state = torch.full((1, 6, 3), NAN)
    y = ops.causal_conv1d(x[:10], weight, bias, state, make_step([10], [10]))
    expected = causal_conv1d_fn(x[:10].T[None], weight, bias, activation="silu")[0].T
    assert torch.allclose(y, expected, atol=1e-6)

    hf_state = x[7:10].T[None].clone()
    y = ops.causal_conv1d(x[10:], weight, bias, state, make_step([1], [11]))
    expected = causal_conv1d_update(x[10:].T[None], hf_state, weight, bias, activation="silu")[0].T
    assert torch.allclose(y, expected, atol=1e-6)
    assert torch.equal(state, hf_state)


def test_a_new_sequence_ignores_what_its_slot_held(ops):
    weight = torch.randn(3, 4)
    x = torch.randn(2, 3)
    dirty, clean = torch.full((1, 3, 3), NAN), torch.zeros(1, 3, 3)
    meta = make_step([2], [2])
    assert torch.equal(ops.causal_conv1d(x, weight, None, dirty, meta), ops.causal_conv1d(x, weight, None, clean, meta))
    assert torch.equal(dirty, clean)


def test_an_empty_step_changes_nothing(ops):
    state = torch.randn(2, 3, 3)
    before = state.clone()
    assert ops.causal_conv1d(torch.zeros(0, 3), torch.randn(3, 4), None, state, make_step([], [])).shape == (0, 3)
    assert torch.equal(state, before)
