"""Norms, rotary embedding, activations and projections against fp64 formulas and transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engram_kernels import Ops
from tests.unit.kernels.steps import relative_rms

DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)]
OPS = Ops.bind("cpu", torch.float32)


def norm64(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rms_norm(ops, dtype, tolerance):
    x, weight = torch.randn(7, 64, dtype=dtype), torch.rand(64, dtype=dtype)
    y = ops.rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    assert relative_rms(y, norm64(x, weight, 1e-5)) < tolerance
    hf = LlamaRMSNorm(64, 1e-5)
    hf.weight.copy_(weight)
    if dtype == torch.float32:
        assert torch.allclose(y, hf(x), atol=1e-6)


def test_rms_norm_normalises_heads_when_x_has_three_dimensions(ops):
    q, weight = torch.randn(5, 3, 16), torch.rand(16)
    assert relative_rms(ops.rms_norm(q, weight, 1e-6), norm64(q, weight, 1e-6)) < 1e-6


def test_rms_norm_of_tiny_values_is_governed_by_eps(ops):
    x = torch.full((1, 8), 1e-20)
    assert relative_rms(ops.rms_norm(x, torch.ones(8), 1e-6), x.double() / 1e-3) < 1e-6


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_add_rms_norm_returns_the_norm_and_the_new_residual(ops, dtype, tolerance):
    x, residual, weight = torch.randn(7, 64, dtype=dtype), torch.randn(7, 64, dtype=dtype), torch.rand(64, dtype=dtype)
    before = residual.clone()
    y, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + before)
    assert torch.equal(residual, before)
    assert torch.equal(y, ops.rms_norm(total, weight, 1e-5))
    assert relative_rms(y, norm64(x.double() + before.double(), weight, 1e-5)) < tolerance


def rotary64(x, positions, angles):
    """Rotate pairs (i, i + n) one by one: x [T, H, D], angles [max, n] fp64."""
    out = x.double().clone()
    half = angles.shape[1]
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            cos, sin = angles[position, i].cos(), angles[position, i].sin()
            first, second = x[t, :, i].double(), x[t, :, i + half].double()
            out[t, :, i] = first * cos - second * sin
            out[t, :, i + half] = second * cos + first * sin
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("half", [8, 5, 1])
def test_rotary_whole_and_partial(ops, dtype, tolerance, half):
    q, k = torch.randn(6, 4, 16, dtype=dtype), torch.randn(6, 2, 16, dtype=dtype)
    angles = torch.rand(40, half, dtype=torch.float64) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    positions = torch.tensor([0, 39, 3, 3, 17, 1])
    rotated_q, rotated_k = ops.rotary(q, k, positions, table)
    assert rotated_q.dtype == dtype
    assert relative_rms(rotated_q, rotary64(q, positions, angles)) < tolerance
    assert relative_rms(rotated_k, rotary64(k, positions, angles)) < tolerance
    assert torch.equal(rotated_q[..., 2 * half :], q[..., 2 * half :])


def test_rotary_agrees_with_transformers(ops):
    q, k = torch.randn(9, 4, 16), torch.randn(9, 2, 16)
    angles = torch.arange(9)[:, None] * (1e4 ** (-torch.arange(8) / 8))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    both = torch.cat((angles, angles), dim=-1)[None]
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], both.cos(), both.sin())
    for got, want in zip(ops.rotary(q, k, torch.arange(9), table), expected, strict=True):
        assert torch.allclose(got, want[0].transpose(0, 1), atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_silu_and_mul_takes_the_gate_first(ops, dtype, tolerance):
    x = torch.randn(5, 32, dtype=dtype) * 3
    gate, up = x.double()[:, :16], x.double()[:, 16:]
    y = ops.silu_and_mul(x)
    assert y.dtype == dtype
    assert relative_rms(y, gate / (1 + (-gate).exp()) * up) < tolerance


def gated_norm64(x, gate, weight, eps, groups):
    gated = x.double() * gate.double() / (1 + (-gate.double()).exp())
    parts = [norm64(part, torch.ones(part.shape[-1]), eps) for part in gated.chunk(groups, dim=-1)]
    return torch.cat(parts, dim=-1) * weight.double()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_gated_rms_norm(ops, dtype, tolerance, groups):
    x, gate = torch.randn(6, 64, dtype=dtype) * 4, torch.randn(6, 64, dtype=dtype)
    weight = torch.rand(64, dtype=dtype)
    y = ops.gated_rms_norm(x, gate, weight, 1e-5, groups)
    assert y.dtype == dtype
    assert relative_rms(y, gated_norm64(x, gate, weight, 1e-5, groups)) < tolerance


def test_gated_rms_norm_agrees_with_transformers(ops):
    x, gate = torch.randn(6, 64), torch.randn(6, 64)
    hf = GraniteMoeHybridRMSNormGated(64, 1e-5)
    hf.weight.copy_(torch.rand(64))
    assert torch.allclose(ops.gated_rms_norm(x, gate, hf.weight, 1e-5), hf(x, gate), atol=1e-6)


def test_gated_rms_norm_accepts_an_unrounded_fp32_input(ops):
    x, gate = torch.randn(6, 64), torch.randn(6, 64, dtype=torch.bfloat16)
    assert ops.gated_rms_norm(x, gate, torch.ones(64, dtype=torch.bfloat16), 1e-5).dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(ops, dtype, tolerance, with_bias):
    x, weight = torch.randn(5, 48, dtype=dtype), torch.randn(24, 48, dtype=dtype)
    bias = torch.randn(24, dtype=dtype) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    y = ops.linear(x, weight, bias)
    assert y.dtype == dtype
    assert relative_rms(y, expected) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_logits_are_fp32(ops, dtype, tolerance):
    hidden, weight = torch.randn(3, 48, dtype=dtype), torch.randn(50, 48, dtype=dtype)
    y = ops.logits(hidden, weight)
    assert y.dtype == torch.float32
    assert relative_rms(y, hidden.double() @ weight.double().T) < tolerance


def test_embedding(ops):
    weight = torch.randn(10, 8, dtype=torch.bfloat16)
    ids = torch.tensor([9, 0, 9, 4])
    assert torch.equal(ops.embedding(ids, weight), torch.stack([weight[i] for i in ids.tolist()]))


@given(tokens=st.integers(0, 5), width=st.integers(1, 33), seed=st.integers(0, 99))
def test_elementwise_ops_keep_shapes_even_for_empty_steps(tokens, width, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 2 * width, generator=generator)
    weight = torch.ones(2 * width)
    assert OPS.silu_and_mul(x).shape == (tokens, width)
    assert OPS.rms_norm(x, weight, 1e-6).shape == x.shape
    assert OPS.gated_rms_norm(x, x, weight, 1e-6, 2).shape == x.shape
    assert OPS.add_rms_norm(x, x, weight, 1e-6)[1].shape == x.shape
    heads = x.reshape(tokens, 1, 2 * width)
    rotated, _ = OPS.rotary(
        heads,
        heads,
        torch.zeros(tokens, dtype=torch.int64),
        torch.cat((torch.ones(1, width), torch.zeros(1, width)), -1),
    )
    assert torch.equal(rotated, heads)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_rope_append_is_the_separate_ops_in_order(ops, normed, rotated):
    qkv = torch.randn(5, 4 + 2 + 2, 16)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    angles = torch.rand(9, 8, dtype=torch.float64) * 6
    positions, slots = torch.tensor([0, 8, 3, 1, 5]), torch.tensor([17, 2, 30, 31, 0])
    weights = (torch.rand(16), torch.rand(16)) if normed else (None, None)
    kv = torch.full((2, 3, 2, 16, 16), float("nan"))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float() if rotated else None
    out = ops.rope_append(q, k, v, positions, table, kv, slots, *weights, 1e-5)
    expected_q, expected_k = q.double(), k.double()
    if normed:
        expected_q, expected_k = norm64(q, weights[0], 1e-5), norm64(k, weights[1], 1e-5)
    if rotated:
        expected_q, expected_k = rotary64(expected_q, positions, angles), rotary64(expected_k, positions, angles)
    assert relative_rms(out, expected_q) < 1e-6
    assert relative_rms(kv[0, slots // 16, :, slots % 16], expected_k) < 1e-6
    assert torch.equal(kv[1, slots // 16, :, slots % 16], v)
    assert int((~kv.isnan()).sum()) == 2 * 5 * 2 * 16
