"""Snapshots between the card and pinned host memory: bit-exact at every size, checked, also beside other work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engram_kernels import Ops
from engram_kernels.checksum.kernel import checksum
from engram_kernels.checksum.reference import checksum as checksum_reference
from engram_kernels.checksum.reference import new_keys
from engram_kernels.gather_kv.reference import gather_kv
from engram_runtime.errors import SnapshotError
from engram_runtime.executor.device.arrivals import Arrivals
from engram_runtime.executor.device.transfer import DeviceTransfer
from engram_runtime.models.caches import Caches

CUDA = torch.device("cuda")
BLOCKS, HEADS, DIM = 2600, 8, 128


@pytest.fixture(scope="module")
def moved() -> Iterator[tuple[DeviceTransfer, Caches]]:
    kv = [torch.randn(2, BLOCKS, HEADS, 16, DIM, device=CUDA).to(torch.bfloat16) for _ in range(6)]
    ssm, conv = torch.randn(5, 36, 48, 64, 128, device=CUDA), torch.randn(5, 36, 3328, 3, device=CUDA).bfloat16()
    caches = Caches(kv, ssm, conv)
    transfer = DeviceTransfer(
        Ops.bind(CUDA, torch.bfloat16), caches, CUDA, lambda: None, Arrivals(len(caches.kv), CUDA)
    )
    assert transfer.reserve(2 << 30).wait(60)
    yield transfer, caches
    transfer.close()


@pytest.mark.parametrize(("first", "count"), [(0, 20_000), (13, 9_001), (4090, 6), (100, 1)])
def test_pieces_go_out_and_come_back(moved: tuple[DeviceTransfer, Caches], first: int, count: int) -> None:
    transfer, caches = moved
    table = torch.randperm(BLOCKS)[: -(-(first + count) // 16)].tolist()
    elsewhere = torch.randperm(BLOCKS)[: len(table)].tolist()
    expected = gather_kv(caches.kv, table, first, count)
    packed = transfer.read_kv(table, first, count)
    assert packed.is_pinned()
    assert torch.equal(packed, expected.cpu())
    transfer.write_kv(elsewhere, first, packed)
    transfer.settle()
    assert torch.equal(gather_kv(caches.kv, elsewhere, first, count), expected)
    skip = count // 3
    transfer.write_kv(table, first + skip, packed[:, :, :, skip:])
    transfer.settle()
    assert torch.equal(gather_kv(caches.kv, table, first + skip, count - skip), expected[:, :, :, skip:])


def test_states_go_out_and_come_back(moved: tuple[DeviceTransfer, Caches]) -> None:
    transfer, caches = moved
    state = transfer.read_state(3)
    assert caches.ssm is not None
    assert caches.conv is not None
    assert torch.equal(state["ssm"], caches.ssm[3].cpu())
    transfer.write_state(1, state)
    transfer.settle()
    assert torch.equal(caches.ssm[1], caches.ssm[3])
    assert torch.equal(caches.conv[1], caches.conv[3])


def test_damage_on_the_host_is_seen(moved: tuple[DeviceTransfer, Caches]) -> None:
    transfer, _ = moved
    table = list(range(200))
    packed = transfer.read_kv(table, 0, 3000)
    packed.view(torch.int16).numpy()[5, 1, 7, 2999, 127] ^= 1
    transfer.write_kv(table, 0, packed)
    with pytest.raises(SnapshotError, match="damaged"):
        transfer.settle()


def test_beside_other_work_and_from_several_threads(moved: tuple[DeviceTransfer, Caches]) -> None:
    transfer, caches = moved
    failures: list[BaseException] = []

    def copy(seed: int) -> None:
        try:
            for round_ in range(12):
                own = range(seed * 600, (seed + 1) * 600)
                table, count = list(own[round_ : round_ + 250]), 3900 + round_
                expected = gather_kv(caches.kv, table, 1, count)
                torch.cuda.current_stream().synchronize()
                packed = transfer.read_kv(table, 1, count)
                assert torch.equal(packed, expected.cpu())
                transfer.write_kv(table[::-1], 1, packed)
                transfer.settle()
                assert torch.equal(gather_kv(caches.kv, table[::-1], 1, count), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=copy, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    a = torch.randn(4096, 4096, device=CUDA)
    for _ in range(20):
        a = (a @ a).clamp(-1, 1)
    for thread in threads:
        thread.join(60)
    assert failures == []


@pytest.mark.parametrize("shape", [(1, 7), (3, 1024), (64, 3000)])
def test_checksum(shape: tuple[int, int]) -> None:
    keys, words = new_keys(CUDA), torch.randint(-(1 << 62), 1 << 62, shape, device=CUDA)
    got, expected = torch.zeros(1, dtype=torch.int64, device=CUDA), torch.zeros(1, dtype=torch.int64)
    checksum(words, keys, got, 2)
    checksum_reference(words.cpu(), keys.cpu(), expected, 2)
    assert int(got) == int(expected)
