"""Ops that write caches in place: what is addressed is right, and nothing else changes (poison stays poison)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_kernels import PAGE, Ops

OPS = Ops.bind("cpu", torch.float32)
NAN = float("nan")


def same(a, b):
    return bool(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) and torch.equal(a.isnan(), b.isnan()))


@given(slots=st.lists(st.integers(0, 5 * PAGE - 1), unique=True, max_size=20), seed=st.integers(0, 99))
def test_append_writes_its_slots_only(slots, seed):
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(len(slots), 3, 4, generator=generator)
    v = torch.randn(len(slots), 3, 4, generator=generator)
    kv = torch.full((2, 5, 3, PAGE, 4), NAN)
    expected = kv.clone()
    for row, slot in enumerate(slots):
        expected[0, slot // PAGE, :, slot % PAGE] = k[row]
        expected[1, slot // PAGE, :, slot % PAGE] = v[row]
    OPS.kv_append(k, v, kv, torch.tensor(slots, dtype=torch.int64))
    assert same(kv, expected)


def test_append_converts_to_the_dtype_of_the_cache(ops):
    kv = torch.zeros(2, 1, 1, PAGE, 4, dtype=torch.bfloat16)
    k = torch.randn(1, 1, 4)
    ops.kv_append(k, k, kv, torch.tensor([3]))
    assert torch.equal(kv[0, 0, 0, 3], k[0, 0].bfloat16())


def test_append_into_a_view_of_a_larger_pool(ops):
    pool = torch.full((2, 4, 2, 1, PAGE, 4), NAN)
    layer = pool[:, :, 1]
    k = torch.randn(1, 1, 4)
    ops.kv_append(k, k, layer, torch.tensor([2 * PAGE + 5]))
    assert torch.equal(pool[1, 2, 1, 0, 5], k[0, 0])
    assert int((~pool.isnan()).sum()) == 8


def test_copy_blocks_reads_every_source_before_it_writes(ops):
    layers = [torch.randn(2, 6, 2, PAGE, 4) for _ in range(3)]
    before = [kv.clone() for kv in layers]
    ops.copy_blocks(layers, torch.tensor([1, 2, 4]), torch.tensor([2, 1, 5]))
    for kv, old in zip(layers, before, strict=True):
        assert torch.equal(kv[:, [2, 1, 5]], old[:, [1, 2, 4]])
        assert torch.equal(kv[:, [0, 3, 4]], old[:, [0, 3, 4]])


def test_copy_state_moves_whole_slots(ops):
    ssm, conv = torch.full((5, 2, 3, 4, 4), NAN), torch.full((5, 2, 6, 3), NAN, dtype=torch.bfloat16)
    ssm[2], conv[2] = torch.randn(2, 3, 4, 4), torch.randn(2, 6, 3).bfloat16()
    ops.copy_state(ssm, conv, torch.tensor([2]), torch.tensor([4]))
    assert torch.equal(ssm[4], ssm[2])
    assert torch.equal(conv[4], conv[2])
    assert bool(ssm[[0, 1, 3]].isnan().all())
    assert bool(conv[[0, 1, 3]].isnan().all())


def test_copy_state_may_swap_two_slots(ops):
    ssm, conv = torch.randn(3, 1, 2, 2, 2), torch.randn(3, 1, 2, 3)
    old_ssm, old_conv = ssm.clone(), conv.clone()
    ops.copy_state(ssm, conv, torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert torch.equal(ssm, old_ssm[[1, 0, 2]])
    assert torch.equal(conv, old_conv[[1, 0, 2]])


spans = st.integers(1, 5).flatmap(
    lambda blocks: st.tuples(
        st.permutations(range(8)).map(lambda order: order[:blocks]),
        st.integers(0, blocks * PAGE),
        st.integers(0, blocks * PAGE),
    ).map(lambda t: (t[0], min(t[1], t[2]), abs(t[1] - t[2])))
)


@given(span=spans, layers=st.integers(1, 3), as_tensor=st.booleans(), seed=st.integers(0, 99))
def test_gather_then_scatter_is_the_identity_on_the_span(span, layers, as_tensor, seed):
    blocks, first, count = span
    block_ids = torch.tensor(blocks, dtype=torch.int32) if as_tensor else blocks
    generator = torch.Generator().manual_seed(seed)
    kv_layers = [torch.randn(2, 8, 2, PAGE, 4, generator=generator) for _ in range(layers)]
    packed = OPS.gather_kv(kv_layers, block_ids, first, count)
    assert packed.shape == (layers, 2, 2, count, 4)
    assert packed.is_contiguous()
    for layer, kv in enumerate(kv_layers):
        for i, position in enumerate(range(first, first + count)):
            assert torch.equal(packed[layer, :, :, i], kv[:, blocks[position // PAGE], :, position % PAGE])

    poisoned = [torch.full_like(kv, NAN) for kv in kv_layers]
    OPS.scatter_kv(packed, poisoned, block_ids, first)
    for kv, out in zip(kv_layers, poisoned, strict=True):
        expected = torch.full_like(kv, NAN)
        for position in range(first, first + count):
            where = blocks[position // PAGE], slice(None), position % PAGE
            expected[:, where[0], :, where[2]] = kv[:, where[0], :, where[2]]
        assert same(out, expected)


def test_scatter_elsewhere_moves_a_span_between_tables(ops):
    source, target = [torch.randn(2, 4, 1, PAGE, 4)], [torch.full((2, 4, 1, PAGE, 4), NAN)]
    packed = ops.gather_kv(source, [3, 1], 5, 20)
    ops.scatter_kv(packed, target, [0, 2], 5)
    assert torch.equal(ops.gather_kv(target, [0, 2], 5, 20), packed)
    assert int((~target[0].isnan()).sum()) == 2 * 20 * 4


def test_gathered_pieces_keep_the_dtype(ops):
    assert ops.gather_kv([torch.zeros(2, 1, 1, PAGE, 4, dtype=torch.bfloat16)], [0], 0, 3).dtype == torch.bfloat16


def test_a_model_without_attention_layers_has_empty_pieces(ops):
    packed = ops.gather_kv([], [0, 1], 3, 20)
    assert packed.shape == (0, 2, 0, 20, 0)
    assert ops.scatter_kv(packed, [], [0, 1], 3) is None


@pytest.mark.parametrize(("first", "count"), [(0, 33), (30, 3), (-1, 2), (3, -1)])
def test_a_span_outside_the_table_is_an_error(ops, first, count):
    kv = [torch.zeros(2, 4, 1, PAGE, 4)]
    with pytest.raises(ValueError, match="not in a table of 2 blocks"):
        ops.gather_kv(kv, [1, 2], first, count)
    if count >= 0:
        with pytest.raises(ValueError, match="not in a table of 2 blocks"):
            ops.scatter_kv(torch.zeros(1, 2, 1, count, 4), kv, [1, 2], first)


def test_a_piece_of_another_model_is_an_error(ops):
    with pytest.raises(ValueError, match="packed holds 2 layers, the cache has 1"):
        ops.scatter_kv(torch.zeros(2, 2, 1, 3, 4), [torch.zeros(2, 4, 1, PAGE, 4)], [0], 0)
