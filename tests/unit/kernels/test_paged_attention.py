"""Attention over pages against plain loops in fp64, under random chunking, with poison wherever nothing was written."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_kernels import PAGE, Ops
from tests.unit.kernels.steps import make_step, relative_rms, replay

OPS = Ops.bind("cpu", torch.float32)


def attention64(q, keys, values, position, scale):
    """One token: q [H, D] against keys and values [L, K, D], looking at positions 0..position."""
    heads, kv_heads = q.shape[0], keys.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(heads):
        k = keys[: position + 1, head // (heads // kv_heads)].double()
        v = values[: position + 1, head // (heads // kv_heads)].double()
        weights = ((k @ q[head].double()) * scale).softmax(0)
        out[head] = weights @ v
    return out


def poisoned_cache(blocks, kv_heads, dim, dtype=torch.float32):
    return torch.full((2, blocks, kv_heads, PAGE, dim), float("nan"), dtype=dtype)


def run_in_chunks(lengths, heads, kv_heads, dim, rng, dtype=torch.float32, max_chunk=40):
    """Every sequence through `kv_append` and `paged_attention`; returns pairs (got [H, D], expected [H, D])."""
    scale = 1 / math.sqrt(dim)
    q = [torch.randn(n, heads, dim).to(dtype) for n in lengths]
    k = [torch.randn(n, kv_heads, dim).to(dtype) for n in lengths]
    v = [torch.randn(n, kv_heads, dim).to(dtype) for n in lengths]
    blocks = 1 + sum(-(-n // PAGE) for n in lengths)
    kv = poisoned_cache(blocks, kv_heads, dim, dtype)
    got, expected = [], []
    for meta, tokens in replay(lengths, rng, max_chunk=max_chunk):
        OPS.kv_append(
            torch.stack([k[s][p] for s, p in tokens]), torch.stack([v[s][p] for s, p in tokens]), kv, meta.slots
        )
        out = OPS.paged_attention(torch.stack([q[s][p] for s, p in tokens]), kv, meta, scale)
        assert out.dtype == dtype
        got.extend(out)
        expected.extend(attention64(q[s][p], k[s], v[s], p, scale) for s, p in tokens)
    assert bool(kv[:, 0].isnan().all()), "block 0 belongs to nobody here"
    return torch.stack(got), torch.stack(expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (8, 1)])
def test_random_chunks_of_mixed_batches(heads, kv_heads):
    got, expected = run_in_chunks([1, 16, 17, 70, 33], heads, kv_heads, 16, random.Random(heads))
    assert relative_rms(got, expected) < 1e-6


def test_bf16_stays_within_its_rounding():
    got, expected = run_in_chunks([40, 7, 16], 4, 2, 16, random.Random(3), torch.bfloat16)
    assert relative_rms(got, expected) < 8e-3


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([8, 16, 24]),
    max_chunk=st.integers(1, 50),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_chunking(lengths, group, kv_heads, dim, max_chunk, seed):
    torch.manual_seed(seed)
    got, expected = run_in_chunks(lengths, group * kv_heads, kv_heads, dim, random.Random(seed), max_chunk=max_chunk)
    assert relative_rms(got, expected) < 1e-6


def test_sequences_that_share_blocks_see_the_same_prefix(ops):
    """Two sequences with one table for the first block, as prefix sharing makes them."""
    dim, scale = 8, 0.3
    kv = poisoned_cache(4, 1, dim)
    k, v = torch.randn(2, 20, 1, dim), torch.randn(2, 20, 1, dim)
    k[1, :16], v[1, :16] = k[0, :16], v[0, :16]
    first = make_step([20], [20], block_tables=[[2, 1]])
    second = make_step([4], [20], block_tables=[[2, 3]])
    ops.kv_append(k[0], v[0], kv, first.slots)
    ops.kv_append(k[1, 16:], v[1, 16:], kv, second.slots)
    q = torch.randn(2, 1, dim)
    both = make_step([1, 1], [20, 20], block_tables=[[2, 1], [2, 3]])
    out = ops.paged_attention(q, kv, both, scale)
    expected = torch.stack([attention64(q[s], k[s], v[s], 19, scale) for s in range(2)])
    assert relative_rms(out, expected) < 1e-6


def test_the_scale_is_the_one_given(ops):
    kv = torch.randn(2, 3, 1, PAGE, 8)
    meta = make_step([1], [30])
    q = torch.randn(1, 2, 8)
    uniform = ops.paged_attention(q, kv, meta, 0.0)
    table = meta.block_tables[0].long()
    values = kv[1, table, 0].reshape(-1, 8)[:30]
    assert torch.allclose(uniform[0, 0], values.mean(0), atol=1e-6)
    assert not torch.allclose(ops.paged_attention(q, kv, meta, 2.0), uniform, atol=1e-3)


def test_an_empty_step_is_empty(ops):
    kv = torch.zeros(2, 1, 1, PAGE, 8)
    assert ops.paged_attention(torch.zeros(0, 2, 8), kv, make_step([], []), 1.0).shape == (0, 2, 8)


def test_a_row_does_not_depend_on_its_company(ops):
    kv = torch.randn(2, 12, 2, PAGE, 16)
    tables = [[3, 1], [5, 4, 2], [7]]
    q = torch.randn(3, 4, 16)
    together = ops.paged_attention(q, kv, make_step([1, 1, 1], [20, 40, 9], block_tables=tables), 0.25)
    for s, length in enumerate([20, 40, 9]):
        alone = ops.paged_attention(q[s : s + 1], kv, make_step([1], [length], block_tables=[tables[s]]), 0.25)
        assert torch.equal(alone[0], together[s])
