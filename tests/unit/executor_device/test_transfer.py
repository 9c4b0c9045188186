"""Snapshots between caches and host memory: pieces of any size, slices, digests, and memory that is reused."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from engram_kernels import Ops
from engram_kernels.checksum.reference import checksum, new_keys
from engram_runtime.errors import SnapshotError
from engram_runtime.executor.device import arena as arenas
from engram_runtime.executor.device import transfer as transfers
from engram_runtime.executor.device.arena import HostArena
from engram_runtime.executor.device.arrivals import Arrivals
from engram_runtime.executor.device.lanes import whole_piece
from engram_runtime.executor.device.transfer import DeviceTransfer
from engram_runtime.models.caches import Caches
from tests.support import patience

CPU = torch.device("cpu")
LAYERS, HEADS, DIM, BLOCKS = 3, 2, 8, 12
TABLE = (7, 2, 9, 4, 11)


def make(arena_bytes: int | None = 1 << 20, **options: Any) -> tuple[DeviceTransfer, Caches, HostArena | None]:
    kv = [torch.randn(2, BLOCKS, HEADS, 16, DIM).to(torch.bfloat16) for _ in range(LAYERS)]
    caches = Caches(kv, torch.randn(4, 2, 3, 4, 5), torch.randn(4, 2, 7, 4).to(torch.bfloat16))
    transfer = DeviceTransfer(Ops.bind("cpu", torch.bfloat16), caches, CPU, lambda: None, Arrivals(LAYERS, CPU))
    arena = None
    if arena_bytes is not None:
        arena = HostArena(arena_bytes, lambda address, nbytes: None, lambda address: None, **options)
        assert arena.wait(patience.SECONDS)
        transfer._arena = arena
    return transfer, caches, arena


def damage(tensor: Tensor, place: tuple[int, ...]) -> None:
    """Flip a bit of a bfloat16 element."""
    tensor.view(torch.int16).numpy()[place] ^= 1


def tokens(caches: Caches, first: int, count: int) -> Tensor:
    """[L, 2, K, count, D] of the sequence with the block table TABLE."""
    rows = [
        [[[layer[side, TABLE[p // 16], head, p % 16] for p in range(first, first + count)] for head in range(HEADS)]
         for side in range(2)]
        for layer in caches.kv
    ]  # fmt: skip
    return torch.stack([torch.stack([torch.stack([torch.stack(h) for h in side]) for side in layer]) for layer in rows])


@pytest.mark.parametrize("piece", [1 << 20, 256])
@pytest.mark.parametrize("group", [64 << 20, 5000, 2500])
@pytest.mark.parametrize(("first", "count"), [(0, 80), (3, 70), (16, 16), (79, 1)])
@pytest.mark.parametrize("arena_bytes", [None, 1 << 20])
def test_what_was_read_is_what_was_there_and_goes_back_elsewhere(
    monkeypatch: pytest.MonkeyPatch, piece: int, group: int, first: int, count: int, arena_bytes: int | None
) -> None:
    monkeypatch.setattr(transfers, "GROUP_BYTES", group)
    monkeypatch.setattr(transfers, "TO_HOST_BYTES", piece)
    monkeypatch.setattr(transfers, "TO_DEVICE_BYTES", 2 * piece)
    transfer, caches, arena = make(arena_bytes)
    expected = tokens(caches, first, count)
    packed = transfer.read_kv(TABLE, first, count)
    assert torch.equal(packed, expected)
    assert (arena is not None and arena.is_sealed(packed)) == (arena is not None)
    before = [layer.clone() for layer in caches.kv]
    for layer in caches.kv:
        layer.normal_()
    others = [layer.clone() for layer in caches.kv]
    transfer.write_kv(TABLE, first, packed)
    transfer.settle()
    assert torch.equal(tokens(caches, first, count), expected)
    for layer, other, was in zip(caches.kv, others, before, strict=True):
        changed = (layer != other).any(-1)
        assert int(changed.sum()) <= 2 * HEADS * count  # and nothing else was touched
        assert torch.equal(layer[changed], was[changed])


def test_a_slice_is_taken_from_its_piece_and_the_piece_is_checked() -> None:
    transfer, caches, arena = make()
    assert arena is not None
    packed = transfer.read_kv(TABLE, 5, 60)
    expected = packed.clone()
    for layer in caches.kv:
        layer.zero_()
    transfer.write_kv(TABLE, 25, packed[:, :, :, 20:50])
    transfer.settle()
    assert torch.equal(tokens(caches, 25, 30), expected[:, :, :, 20:50])
    assert int(tokens(caches, 0, 25).count_nonzero()) == int(tokens(caches, 55, 25).count_nonzero()) == 0
    damage(packed, (0, 0, 0, 59, 0))  # outside the slice, and damage all the same
    transfer.write_kv(TABLE, 25, packed[:, :, :, 20:50])
    with pytest.raises(SnapshotError, match="damaged"):
        transfer.settle()
    assert not arena.is_sealed(packed)
    transfer.settle()  # said once


def test_a_slice_of_anything_else_is_copied() -> None:
    piece = torch.randn(LAYERS, 2, HEADS, 10, DIM)
    assert whole_piece(piece)[0] is piece
    whole, skip = whole_piece(piece[:, :, :, 3:7])
    assert skip == 3
    assert whole.data_ptr() == piece.data_ptr()
    assert whole.shape == piece.shape
    larger = torch.randn(LAYERS + 1, 2, HEADS, 10, DIM)
    whole, skip = whole_piece(larger[1:, :, :, 3:7])
    assert skip == 0
    assert torch.equal(whole, larger[1:, :, :, 3:7])


@pytest.mark.parametrize("piece", [1 << 20, 64])
def test_states_go_both_ways_and_are_checked(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(transfers, "TO_HOST_BYTES", piece)
    monkeypatch.setattr(transfers, "TO_DEVICE_BYTES", 2 * piece)
    transfer, caches, arena = make()
    assert arena is not None
    assert caches.ssm is not None
    assert caches.conv is not None
    state = transfer.read_state(2)
    assert torch.equal(state["ssm"], caches.ssm[2])
    assert torch.equal(state["conv"], caches.conv[2])
    transfer.write_state(0, state)
    transfer.settle()
    assert torch.equal(caches.ssm[0], caches.ssm[2])
    assert torch.equal(caches.conv[0], caches.conv[2])
    damage(state["conv"], (1, 2, 3))
    transfer.write_state(0, state)
    with pytest.raises(SnapshotError, match="damaged"):
        transfer.settle()
    with pytest.raises(ValueError, match="ssm must have shape"):
        transfer.write_state(0, {})
    with pytest.raises(ValueError, match=r"ssm must be torch\.float32, got torch\.float64"):
        transfer.write_state(0, {**state, "ssm": state["ssm"].double()})


def test_bytes_from_elsewhere_are_known_once_they_were_written() -> None:
    """What a disk gave was checked there; from its first way through the device on the device checks it."""
    transfer, _, arena = make()
    assert arena is not None
    piece = arena.empty((LAYERS, 2, HEADS, 16, DIM), torch.bfloat16).normal_()
    assert not arena.is_sealed(piece)
    transfer.write_kv(TABLE, 0, piece)
    transfer.settle()
    assert arena.is_sealed(piece)
    damage(piece, (0, 0, 0, 0, 0))
    transfer.write_kv(TABLE, 0, piece)
    with pytest.raises(SnapshotError, match="damaged"):
        transfer.settle()


def test_without_checks_nothing_is_sealed() -> None:
    transfer, _, arena = make(verify=False)
    assert arena is not None
    packed = transfer.read_kv(TABLE, 0, 20)
    assert not arena.is_sealed(packed)
    damage(packed, (0, 0, 0, 0, 0))
    transfer.write_kv(TABLE, 0, packed)
    transfer.settle()


def test_threads_settle_for_themselves() -> None:
    transfer, _, arena = make()
    assert arena is not None
    good, bad = transfer.read_kv(TABLE, 0, 20), transfer.read_kv(TABLE, 20, 20)
    damage(bad, (0, 0, 0, 0, 0))
    transfer.write_kv(TABLE, 20, bad)
    outcome: list[str] = []

    def other() -> None:
        transfer.write_kv(TABLE, 0, good)
        transfer.settle()
        outcome.append("fine")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(patience.SECONDS)
    assert outcome == ["fine"]
    with pytest.raises(SnapshotError):
        transfer.settle()


# The arena


def make_arena(nbytes: int, **options: Any) -> HostArena:
    arena = HostArena(nbytes, lambda address, size: None, lambda address: None, **options)
    assert arena.wait(patience.SECONDS)
    return arena


def test_pieces_go_back_when_nobody_shares_them_any_more() -> None:
    arena = make_arena(10 * 4096)
    first = arena.empty((4096,), torch.uint8)
    rest = arena.empty((9 * 4096,), torch.uint8)
    assert arena.free == 0
    outside = arena.empty((1,), torch.uint8)  # ordinary memory
    arena.seal(outside, 5)
    assert not arena.is_sealed(outside)
    view = rest[100:200]
    arena.seal(rest, 1)
    del rest
    gc.collect()
    assert arena.free == 0
    del view
    assert arena.free == 9 * 4096
    arena.seal(first, 7)
    del first
    assert arena.free == 10 * 4096
    again = arena.empty((10 * 4096,), torch.uint8)  # in one piece again, and its old digests are forgotten
    assert not arena.is_sealed(again)
    assert again.data_ptr() % arenas.ALIGNMENT == 0


def test_what_is_in_the_way_is_let_go() -> None:
    arena = make_arena(8 * 4096)
    held = [arena.empty((4 * 4096,), torch.uint8) for _ in range(2)]
    asked: list[int] = []

    def reclaim(nbytes: int) -> bool:
        asked.append(nbytes)
        return bool(held) and held.pop() is not None

    arena.reclaim = reclaim
    found = arena.empty((3, 4096), torch.uint8)
    assert asked == [3 * 4096]
    arena.seal(found, 1)
    assert arena.is_sealed(found)
    arena.empty((9 * 4096,), torch.uint8)
    assert len(asked) == 1  # nothing that could be let go would do


def test_what_lies_apart_or_is_still_held_is_not_enough() -> None:
    arena = make_arena(8 * 4096)
    held = [arena.empty((2 * 4096,), torch.uint8) for _ in range(4)]
    reader, order = held[2], [0, 2, 3, 1]
    asked: list[int] = []

    def reclaim(nbytes: int) -> bool:
        asked.append(nbytes)
        if order:
            held[order.pop(0)] = torch.empty(0)
        return len(asked) <= 4

    arena.reclaim = reclaim
    found = arena.empty((4 * 4096,), torch.uint8)
    arena.seal(found, 1)
    assert arena.is_sealed(found)
    assert len(asked) == 4, "two of the first three lie apart, and one of them is being read"
    assert reader.numel() == 2 * 4096
    del found
    assert arena.empty((7 * 4096,), torch.uint8).numel() == 7 * 4096
    assert len(asked) == 5, "nothing was left to let go: ordinary memory, without asking again"


def test_small_pieces_do_not_break_up_the_room_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALL_BYTES", 2 * 4096)
    arena = make_arena(12 * 4096)
    first, small, second, other = (arena.empty((pages * 4096,), torch.uint8) for pages in (4, 1, 4, 1))
    places = [(t.data_ptr() - arena._address) // 4096 for t in (first, small, second, other)]
    assert places == [0, 11, 4, 10]
    del first, second
    assert arena.empty((10 * 4096,), torch.uint8).data_ptr() == arena._address


def test_copies_do_not_cross_what_was_registered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALL_BYTES", 0)  # in order
    arena = make_arena(8 * 4096, slab_bytes=4 * 4096)
    arena.empty((3 * 4096,), torch.uint8)
    kept = arena.empty((3 * 4096,), torch.uint8)
    tensor = arena.empty((1024 * 5,), torch.int32)
    assert len(arena.cuts(tensor, 1 << 20)) == 2
    parts = [part for most in (1 << 20, 5000) for part in tensor.view(torch.uint8).split(arena.cuts(tensor, most))]
    assert {part.numel() for part in parts[2:]} > {5000}
    assert max(part.numel() for part in parts[2:]) == 5000
    for part in parts:
        first = part.data_ptr() - arena._address
        assert first // (4 * 4096) == (first + part.numel() - 1) // (4 * 4096)
    assert arena.cuts(torch.zeros(7, dtype=torch.int64), 1 << 20) == [56]
    assert arena.cuts(torch.zeros(7, dtype=torch.int64), 24) == [24, 24, 8]
    del kept


def test_memory_that_cannot_be_registered_is_ordinary_memory() -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise OSError("no")

    arena = HostArena(8 * 4096, refuse, lambda address: None)
    assert arena.wait(patience.SECONDS)
    assert arena.ready == arena.free == 0
    assert arena.empty((2, 3), torch.float32).shape == (2, 3)
    arena.close()


def test_the_digest_depends_on_every_word_and_its_place() -> None:
    keys = new_keys(CPU)

    def digest(words: Tensor, first_row: int = 0) -> int:
        into = torch.zeros(1, dtype=torch.int64)
        checksum(words, keys, into, first_row)
        return int(into)

    words = torch.randint(-(1 << 62), 1 << 62, (4, 2100))
    whole = digest(words)
    parts = torch.zeros(1, dtype=torch.int64)
    checksum(words[:1], keys, parts, 0)
    checksum(words[1:], keys, parts, 1)
    assert int(parts) == whole
    for row, column in ((0, 0), (3, 2099), (2, 1024)):
        changed = words.clone()
        changed[row, column] ^= 1
        assert digest(changed) != whole
    assert digest(words[[1, 0, 2, 3]]) != whole
    assert digest(words, 1) != whole
