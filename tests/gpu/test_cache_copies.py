"""Snapshot gather and scatter, block and state copies on the GPU: bit-exact, nothing else touched."""

from __future__ import annotations

import pytest
import torch

from engram_kernels.copy_blocks.kernel import copy_blocks
from engram_kernels.copy_state.kernel import copy_state
from engram_kernels.gather_kv.kernel import gather_kv
from engram_kernels.gather_kv.reference import gather_kv as gather_reference
from engram_kernels.scatter_kv.kernel import scatter_kv
from engram_kernels.scatter_kv.reference import scatter_kv as scatter_reference


@pytest.mark.parametrize(("first", "count"), [(0, 4096), (13, 3001), (4090, 6), (100, 1)])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float32, 80), (torch.bfloat16, 64)], ids=str)
def test_gather_and_scatter(first: int, count: int, dtype: torch.dtype, dim: int) -> None:
    blocks = torch.randperm(300)[:256].tolist()
    layers = [torch.randn(2, 300, 4, 16, dim, device="cuda").to(dtype) for _ in range(5)]
    packed = gather_kv(layers, blocks, first, count)
    assert torch.equal(packed, gather_reference(layers, blocks, first, count))
    got = [torch.randn(2, 300, 4, 16, dim, device="cuda").to(dtype) for _ in range(5)]
    expected = [layer.clone() for layer in got]
    scatter_kv(packed.cpu().pin_memory(), got, blocks, first)
    scatter_reference(packed, expected, blocks, first)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_copies_between_blocks_and_slots() -> None:
    layers = [torch.randn(2, 50, 8, 16, 128, device="cuda").to(torch.bfloat16) for _ in range(3)]
    src, dst = torch.randperm(50, device="cuda")[:20].chunk(2)
    expected = [kv.clone() for kv in layers]
    for kv in expected:
        kv[:, dst] = kv[:, src]
    copy_blocks(layers, src, dst)
    assert all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))
    ssm = torch.randn(6, 36, 48, 64, 128, device="cuda")
    conv = torch.randn(6, 36, 3328, 3, device="cuda").to(torch.bfloat16)
    states = ssm.clone(), conv.clone()
    src, dst = torch.tensor([0, 3], device="cuda"), torch.tensor([5, 1], device="cuda")
    for state in states:
        state[dst] = state[src]
    copy_state(ssm, conv, src, dst)
    assert torch.equal(ssm, states[0])
    assert torch.equal(conv, states[1])
