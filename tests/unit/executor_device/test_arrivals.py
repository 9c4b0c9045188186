"""Restores that arrive layer by layer, and steps that follow them closely."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from engram_kernels import Ops
from engram_runtime.errors import SnapshotError
from engram_runtime.executor.device import gather
from engram_runtime.executor.device import transfer as transfers
from engram_runtime.executor.device.arena import HostArena
from engram_runtime.executor.device.arrivals import MOST_GATES, Arrivals, ArrivingCaches, hold_reference
from engram_runtime.executor.device.executor import DeviceExecutor
from engram_runtime.executor.device.transfer import DeviceTransfer
from engram_runtime.executor.plan import RowOpen, RowSampling, SequencePlan, StepPlan
from engram_runtime.models.caches import Caches
from tests.support import patience
from tests.support.device_step import load_tiny, make_executor
from tests.support.tiny import make_tiny

CPU = torch.device("cpu")
LAYERS, HEADS, DIM = 10, 2, 8
TABLE = (7, 2, 9, 4, 11)


# Gates


@pytest.mark.parametrize("layers", [0, 1, 2, 4, 7, 8, 9, 28, 36, 80])
def test_every_layer_lies_behind_its_gate(layers: int) -> None:
    arrivals = Arrivals(layers, CPU)
    assert arrivals.gates == min(layers, MOST_GATES)
    asked: list[int] = []
    arrivals._hold = lambda reached, gate, ticket: asked.append(gate)
    for layer in range(layers):
        arrivals.hold(layer, torch.zeros(1, dtype=torch.int64))
        assert arrivals.first_layer(asked[-1]) <= layer < arrivals.first_layer(asked[-1] + 1)
    assert asked == list(range(arrivals.gates))
    assert arrivals.first_layer(arrivals.gates) == layers


@pytest.mark.parametrize("hold", [hold_reference, gather.hold], ids=["reference", "kernel"])
def test_a_gate_is_open_to_those_whose_restore_came(hold: Callable[[Tensor, int, Tensor], None]) -> None:
    reached = torch.tensor([7, 3])
    for ticket in (0, 3, 7):
        hold(reached, 0, torch.tensor([ticket]))
    hold(reached, 1, torch.tensor([3]))
    assert reached.tolist() == [7, 3]


def test_where_nothing_comes_later_a_closed_gate_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="restore 4 has not come to gate 1"):
        hold_reference(torch.tensor([7, 3]), 1, torch.tensor([4]))


def test_caches_of_a_step_ask_before_they_are_read() -> None:
    kv = [torch.zeros(1) for _ in range(LAYERS)]
    arrivals = Arrivals(LAYERS, CPU)
    caches = ArrivingCaches(kv, arrivals=arrivals, ticket=torch.tensor([2]))
    arrivals.announce(0, 3, 2)
    border = arrivals.first_layer(3)
    for layer in range(border):
        assert caches.pages(layer) is kv[layer]
    with pytest.raises(RuntimeError):
        caches.pages(border)


# Writing


def make(arena_bytes: int | None = 1 << 22) -> tuple[DeviceTransfer, Caches, Arrivals]:
    kv = [torch.randn(2, 12, HEADS, 16, DIM).to(torch.bfloat16) for _ in range(LAYERS)]
    caches = Caches(kv, torch.randn(4, 2, 3, 4, 5), torch.randn(4, 2, 7, 4).to(torch.bfloat16))
    arrivals = Arrivals(LAYERS, CPU)
    transfer = DeviceTransfer(Ops.bind("cpu", torch.bfloat16), caches, CPU, lambda: None, arrivals)
    if arena_bytes is not None:
        transfer._arena = HostArena(arena_bytes, lambda address, nbytes: None, lambda address: None)
        assert transfer._arena.wait(patience.SECONDS)
    return transfer, caches, arrivals


def pieces_of(transfer: DeviceTransfer, *borders: int) -> list[tuple[int, Tensor]]:
    """[first, packed] of the sequence with the block table TABLE, cut at borders."""
    return [(first, transfer.read_kv(TABLE, first, end - first)) for first, end in pairwise(borders)]


@pytest.mark.parametrize("group", [64 << 20, 1300])
@pytest.mark.parametrize("most", [1, 3 * 2 * HEADS * 20 * DIM * 2, 1 << 30], ids=["gates", "some", "one"])
@pytest.mark.parametrize("lead", [0, 5000, 1 << 30])
@pytest.mark.parametrize("borders", [(0, 75), (3, 20, 21, 60, 75)])
def test_layers_come_in_their_order_and_are_announced_when_they_are_there(
    monkeypatch: pytest.MonkeyPatch, group: int, most: int, lead: int, borders: tuple[int, ...]
) -> None:
    monkeypatch.setattr(transfers, "GROUP_BYTES", group)
    monkeypatch.setattr(transfers, "LAYERS_BYTES", most)
    monkeypatch.setattr(transfers, "LEAD_BYTES", lead)
    transfer, caches, arrivals = make()
    pieces, state = pieces_of(transfer, *borders), transfer.read_state(2)
    before = [layer.clone() for layer in caches.kv]
    for layer in caches.kv:
        layer.zero_()
    announced: list[int] = []
    announce = arrivals.announce

    def told(first: int, end: int, ticket: int) -> None:
        there = [bool(layer.count_nonzero()) for layer in caches.kv]
        assert there == [layer < arrivals.first_layer(end) for layer in range(LAYERS)]
        announced.extend(range(first, end))
        announce(first, end, ticket)

    monkeypatch.setattr(arrivals, "announce", told)
    assert transfer.write(TABLE, pieces, 0, state) == 1
    assert announced == list(range(arrivals.gates))
    assert arrivals._reached.tolist() == [1] * arrivals.gates
    transfer.follow(1, layers=True)
    transfer.settle()
    rows = [(TABLE[p // 16], p % 16) for p in range(borders[0], borders[-1])]
    for layer, was in zip(caches.kv, before, strict=True):
        for block, offset in rows:
            assert torch.equal(layer[:, block, :, offset], was[:, block, :, offset])
        assert int(layer.count_nonzero()) == sum(int(was[:, b, :, o].count_nonzero()) for b, o in rows)
    assert caches.ssm is not None
    assert torch.equal(caches.ssm[0], caches.ssm[2])
    monkeypatch.setattr(arrivals, "announce", announce)
    assert transfer.write(TABLE, pieces, None, {}) == 2
    transfer.settle()
    assert transfer._arriving == {}


def test_a_restore_of_a_state_alone_has_a_number_too() -> None:
    transfer, caches, arrivals = make()
    assert transfer.write(TABLE, [], 1, transfer.read_state(3)) == 1
    assert arrivals._reached.tolist() == [1] * arrivals.gates  # or a step that follows would wait for ever
    transfer.settle()
    assert caches.conv is not None
    assert torch.equal(caches.conv[1], caches.conv[3])


def test_keys_of_another_dtype_are_there_at_once() -> None:
    transfer, caches, _ = make()
    (first, packed), *_ = pieces_of(transfer, 0, 40)
    before = [layer.clone() for layer in caches.kv]
    for layer in caches.kv:
        layer.zero_()
    assert transfer.write(TABLE, [(first, packed.float())], None, {}) == 0
    assert torch.equal(caches.kv[4][:, TABLE[0]], before[4][:, TABLE[0]])
    transfer.settle()


@pytest.mark.parametrize("place", [(0, 0, 0, 0, 0), (LAYERS - 1, 1, 1, 38, DIM - 1)])
def test_damage_shows_when_it_is_settled(monkeypatch: pytest.MonkeyPatch, place: tuple[int, ...]) -> None:
    monkeypatch.setattr(transfers, "LAYERS_BYTES", 1)
    transfer, _, _ = make()
    pieces = pieces_of(transfer, 0, 40, 75)
    pieces[0][1].view(torch.int16).numpy()[place] ^= 1
    assert transfer.write(TABLE, pieces, None, {}) == 1
    with pytest.raises(SnapshotError, match="damaged"):
        transfer.settle()
    assert transfer._arriving == {}
    assert transfer.write(TABLE, pieces[1:], None, {}) == 2
    transfer.settle()


def test_a_state_of_another_shape_is_refused_before_anything_is_written() -> None:
    transfer, caches, arrivals = make()
    pieces = pieces_of(transfer, 0, 40)
    for layer in caches.kv:
        layer.zero_()
    with pytest.raises(ValueError, match="ssm must have shape"):
        transfer.write(TABLE, pieces, 0, {})
    assert not any(layer.count_nonzero() for layer in caches.kv)
    assert arrivals._reached.tolist() == [0] * arrivals.gates
    transfer.settle()


# Steps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = load_tiny(make_tiny(family, tmp_path_factory.mktemp(family)))
        return made[family]

    return get


PROMPT = tuple((7 * i) % 500 for i in range(45))
BLOCKS = (3, 4, 5)
GREEDY = RowSampling(temperature=0.0)


def chunk(row: int, start: int, end: int, blocks: tuple[int, ...], **plan: Any) -> StepPlan:
    sequence = SequencePlan(row, start, PROMPT[start:end], blocks, row, end == len(PROMPT))
    return StepPlan(plan.pop("step"), (sequence,), opens=(RowOpen(row, GREEDY, PROMPT),), **plan)


def token(executor: DeviceExecutor, plan: StepPlan) -> int:
    executor.submit(plan)
    return executor.collect().sampled[plan.sequences[0].row].token_id


@pytest.mark.parametrize("kind", ["plain", "launched", "recorded"])
@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_a_step_goes_on_from_what_arrives(tiny: Callable[[str], Any], family: str, kind: str) -> None:
    model, ops = tiny(family)
    sizes = {"seqs": 4, "window": 64, "tokens": 512}
    source, target = make_executor("launched", model, ops, **sizes), make_executor(kind, model, ops, **sizes)
    source.submit(chunk(0, 0, 40, BLOCKS, step=0))
    source.collect()
    kv = [(first, source.transfer.read_kv(BLOCKS, first, count)) for first, count in ((0, 16), (16, 24))]
    state = source.transfer.read_state(0)
    expected = token(source, StepPlan(1, (SequencePlan(0, 40, PROMPT[40:], BLOCKS, 0, True),)))
    for step, blocks in enumerate(((3, 4, 5), (6, 7, 8), (9, 10, 11))):  # launched, then recorded, then repeated
        slot = step if state else None
        ticket = target.transfer.write(blocks, kv, slot, state)
        assert token(target, chunk(step, 40, 45, blocks, step=step, after=ticket)) == expected
        target.transfer.settle()
    for step in range(3, 6) if state else ():  # the keys and values are there already
        ticket = target.transfer.write(BLOCKS, [], 3, state)
        plan = StepPlan(
            step,
            (SequencePlan(3, 40, PROMPT[40:], BLOCKS, 3, True),),
            opens=(RowOpen(3, GREEDY, PROMPT),),
            closes=(3,) if step > 3 else (),
            after=ticket,
        )
        assert token(target, plan) == expected
        target.transfer.settle()
    if kind == "recorded":
        assert target.recorded > 0
        with pytest.raises(RuntimeError, match="restore 99 has not come"):
            target.submit(chunk(3, 40, 45, (3, 4, 5), step=9, after=99))
