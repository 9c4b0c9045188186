"""Copies between pages, packed spans and state slots are bit-exact and touch nothing else."""

from __future__ import annotations

import pytest
import torch

from engram_kernels.checksum.kernel import checksum
from engram_kernels.checksum.reference import checksum as checksum_reference
from engram_kernels.checksum.reference import new_keys
from engram_kernels.copy_blocks.kernel import copy_blocks
from engram_kernels.copy_state.kernel import copy_state
from engram_kernels.gather_kv.kernel import gather_kv
from engram_kernels.gather_kv.reference import gather_kv as gather_reference
from engram_kernels.scatter_kv.kernel import scatter_kv
from engram_kernels.scatter_kv.reference import scatter_kv as scatter_reference

BLOCKS = [5, 0, 3, 6, 2, 1]


@pytest.mark.parametrize(("first", "count"), [(0, 96), (7, 70), (16, 1), (90, 6), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gather_and_scatter(first: int, count: int, dtype: torch.dtype) -> None:
    layers = [torch.randn(2, 8, 3, 16, 12).to(dtype) for _ in range(2)]
    packed = gather_kv(layers, BLOCKS, first, count)
    assert torch.equal(packed, gather_reference(layers, BLOCKS, first, count))
    got = [torch.randn(2, 8, 3, 16, 12).to(dtype) for _ in range(2)]
    expected = [layer.clone() for layer in got]
    scatter_kv(packed, got, torch.tensor(BLOCKS), first)
    scatter_reference(packed, expected, BLOCKS, first)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_spans_outside_the_table_are_refused() -> None:
    layers = [torch.zeros(2, 8, 3, 16, 12)]
    with pytest.raises(ValueError, match="not in a table of 6 blocks"):
        gather_kv(layers, BLOCKS, 90, 7)
    with pytest.raises(ValueError, match="2 layers"):
        scatter_kv(torch.zeros(2, 2, 3, 4, 12), layers, BLOCKS, 0)


@pytest.mark.parametrize(("heads", "dim"), [(2, 12), (20, 16)], ids=["one part", "several parts"])
def test_copy_blocks(heads: int, dim: int) -> None:
    layers = [torch.randn(2, 6, heads, 16, dim) for _ in range(3)]
    expected = [kv.clone() for kv in layers]
    for kv in expected:
        kv[:, [4, 0]] = kv[:, [1, 5]]
    copy_blocks(layers, torch.tensor([1, 5]), torch.tensor([4, 0]))
    assert all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))
    copy_blocks([], torch.tensor([1]), torch.tensor([4]))


@pytest.mark.parametrize("conv_shape", [(5, 3, 7, 3), (5, 2, 1025, 3)], ids=["odd", "large"])
def test_copy_state(conv_shape: tuple[int, ...]) -> None:
    ssm, conv = torch.randn(5, 3, 2, 4, 9), torch.randn(conv_shape).to(torch.bfloat16)
    expected = ssm.clone(), conv.clone()
    for state in expected:
        state[[3, 0]] = state[[1, 4]]
    copy_state(ssm, conv, torch.tensor([1, 4]), torch.tensor([3, 0]))
    assert torch.equal(ssm, expected[0])
    assert torch.equal(conv, expected[1])


@pytest.mark.parametrize("shape", [(1, 5), (3, 1024), (7, 2500)])
def test_checksum(shape: tuple[int, int]) -> None:
    keys, words = new_keys(torch.device("cpu")), torch.randint(-(1 << 63), (1 << 63) - 1, shape)
    got, expected = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    checksum(words, keys, got, 4)
    checksum_reference(words, keys, expected, 4)
    assert int(got) == int(expected)
