"""Norms, rotary embedding with KV append, gated activation, embedding and linear layers against their references."""

from __future__ import annotations

import pytest
import torch

from engram_kernels.embedding.kernel import embedding
from engram_kernels.gated_linear.kernel import Tile, run_wide
from engram_kernels.gated_linear.reference import gated_linear as gated_reference
from engram_kernels.kv_append import reference as append_reference
from engram_kernels.kv_append.kernel import kv_append
from engram_kernels.linear.kernel import Gemv, Skinny, run, run_gated
from engram_kernels.rms_norm.kernel import add_rms_norm, rms_norm
from engram_kernels.rms_norm.reference import rms_norm as rms_norm_reference
from engram_kernels.rope_append.kernel import rope_append
from engram_kernels.rope_append.reference import rope_append as rope_append_reference
from engram_kernels.rotary.kernel import rotary
from engram_kernels.rotary.reference import rotary as rotary_reference
from engram_kernels.silu_and_mul.kernel import silu_and_mul
from engram_kernels.silu_and_mul.reference import silu_and_mul as silu_and_mul_reference
from tests.support.kernel_cases import relative_error


@pytest.mark.parametrize("shape", [(3, 48), (5, 2, 16), (1, 1200)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    assert relative_error(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)) < 1e-6


def test_rms_norm_of_heads_inside_a_wider_row() -> None:
    x, weight = torch.randn(4, 6 * 16)[:, :32].view(4, 2, 16), torch.randn(16)
    assert relative_error(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6)) < 1e-6


def test_add_rms_norm_rounds_the_sum_first() -> None:
    x, residual, weight = torch.randn(3, 40).half(), torch.randn(3, 40).half(), torch.randn(40).half()
    _, scaled = add_rms_norm(x, residual, weight, 1e-5, 0.5)
    assert relative_error(scaled, x * 0.5 + residual) < 1e-3
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert relative_error(normed, rms_norm_reference(x + residual, weight, 1e-5)) < 1e-3


def _cos_sin(positions: int, rot: int) -> torch.Tensor:
    angle = torch.randn(positions, rot // 2)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@pytest.mark.parametrize("rot", [16, 8, 0])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_append(rot: int, norm: bool) -> None:
    wide = torch.randn(5, (6 + 2 + 2) * 16)
    q, k, v = (part.view(5, -1, 16) for part in wide.split([96, 32, 32], dim=-1))
    positions = torch.tensor([3, 0, 9, 4, 5])
    slots = torch.tensor([17, 0, 40, 63, 2])
    weights = (torch.randn(16), torch.randn(16)) if norm else (None, None)
    cos_sin = _cos_sin(10, rot) if rot else None
    kv, kv_expected = torch.zeros(2, 4, 2, 16, 16), torch.zeros(2, 4, 2, 16, 16)
    out = rope_append(q, k, v, positions, cos_sin, kv, slots, *weights)
    expected = rope_append_reference(q, k, v, positions, cos_sin, kv_expected, slots, *weights)
    assert relative_error(out, expected) < 1e-6
    assert relative_error(kv, kv_expected) < 1e-6
    assert torch.equal(kv == 0, kv_expected == 0)


def test_rotary_alone() -> None:
    q, k, positions = torch.randn(3, 9, 24), torch.randn(3, 3, 24), torch.tensor([1, 0, 4])
    cos_sin = _cos_sin(5, 24)
    for got, expected in zip(rotary(q, k, positions, cos_sin), rotary_reference(q, k, positions, cos_sin), strict=True):
        assert relative_error(got, expected) < 1e-6


def test_append_alone_skips_padding() -> None:
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    kv, expected = torch.zeros(2, 2, 2, 16, 16), torch.zeros(2, 2, 2, 16, 16)
    kv_append(k, v, kv, torch.tensor([5, -1, 31]))
    append_reference.kv_append(k[[0, 2]], v[[0, 2]], expected, torch.tensor([5, 31]))
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("shape", [(3, 96), (20, 600), (2, 2, 32)])
def test_silu_and_mul(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert relative_error(silu_and_mul(x), silu_and_mul_reference(x)) < 1e-6


def test_embedding() -> None:
    ids, weight = torch.tensor([4, 0, 4, 9]), torch.randn(10, 1100)
    assert torch.equal(embedding(ids, weight), weight[ids])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("n", "k", "bn", "bk"), [(10, 96, 4, 128), (7, 96, 2, 32), (5, 64, 2, 32), (4, 112, 2, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_gemv(rows: int, n: int, k: int, bn: int, bk: int, bias: bool) -> None:
    x, weight = torch.randn(rows, k), torch.randn(n, k)
    b = torch.randn(n) if bias else None
    y = torch.full((rows, n), torch.nan)
    run(Gemv(bn, bk, 4), x, weight, b, y)
    assert relative_error(y, torch.nn.functional.linear(x, weight, b)) < 1e-6


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("n", "k", "bn", "bk"), [(10, 96, 4, 128), (7, 96, 2, 32), (5, 64, 2, 32), (4, 112, 2, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_gemv(rows: int, n: int, k: int, bn: int, bk: int, bias: bool) -> None:
    x, weight = torch.randn(rows, k), torch.randn(2 * n, k)
    b = torch.randn(2 * n) if bias else None
    y = torch.full((rows, n), torch.nan)
    run_gated(Gemv(bn, bk, 4), x, weight, b, y)
    assert relative_error(y, gated_reference(x, weight, b)) < 1e-6


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_skinny(split: int, swap: bool, bias: bool) -> None:
    x, weight = torch.randn(5, 128).half(), torch.randn(40, 128).half()
    b = torch.randn(40).half() if bias else None
    for _ in range(2):  # twice: the first call must leave the counters at zero
        y = torch.full((5, 40), torch.nan)
        run(Skinny(16, 32, 32, split, swap, 1, 4), x, weight, b, y)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        assert relative_error(y, expected) < 1e-6


@pytest.mark.parametrize(("rows", "outputs", "k"), [(70, 64, 128), (5, 32, 64), (130, 96, 64)])
@pytest.mark.parametrize("tile", [Tile(32, 32, 32, 2, 4, 2), Tile(16, 16, 64, 1, 4, 8)])
def test_wide_gated_tiles(rows: int, outputs: int, k: int, tile: Tile) -> None:
    x, weight = torch.randn(rows, k).half(), (torch.randn(2 * outputs, k) * 0.1).half()
    y = torch.full((rows, outputs), float("nan"), dtype=torch.float16)
    run_wide(tile, x, weight, y)
    assert relative_error(y, gated_reference(x.float(), weight.float())) < 1e-3
