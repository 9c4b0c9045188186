"""What a step waits for before it follows a restore, and what is left of one that fails half-way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engram_runtime.executor.device import lanes
from engram_runtime.executor.device import transfer as transfers
from engram_runtime.executor.device.staging import Done
from tests.support.device_step import make_executor
from tests.unit.executor_device.test_arrivals import (
    BLOCKS,
    CPU,
    HEADS,
    LAYERS,
    TABLE,
    chunk,
    make,
    pieces_of,
    tiny,
    token,
)

__all__ = ["tiny"]


class Mark(Done):
    def __init__(self, name: str, told: list[str]) -> None:
        super().__init__(CPU)
        self._name, self._told = name, told

    def hold_back(self) -> None:
        self._told.append(self._name)


def test_a_step_that_asks_at_each_gate_waits_for_the_state_others_for_everything() -> None:
    transfer, _, _ = make()
    ticket = transfer.write(TABLE, pieces_of(transfer, 0, 40), 0, transfer.read_state(2))
    told: list[str] = []
    transfer._arriving[ticket] = transfers._Arriving(Mark("state", told), Mark("whole", told))
    transfer.follow(ticket, layers=True)
    assert told == ["state"]
    transfer.follow(ticket, layers=False)
    assert told == ["state", "whole"]
    transfer.settle()
    for over in (0, ticket):
        transfer.follow(over, layers=False)
    assert told == ["state", "whole"]


@pytest.mark.parametrize("kind", ["launched", "recorded"])
def test_a_step_follows_before_it_copies_anything(
    tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What it copies may be the state that comes; only a recorded step asks at the gates."""
    model, ops = tiny("granite")
    executor = make_executor(kind, model, ops, seqs=4, window=64, tokens=512)
    told: list[Any] = []
    follow, move = executor.transfer.follow, executor._memory.move

    def following(ticket: int, *, layers: bool) -> None:
        told.append((ticket, layers))
        follow(ticket, layers=layers)

    def moving(*args: Any) -> None:
        told.append("copies")
        move(*args)

    monkeypatch.setattr(executor.transfer, "follow", following)
    monkeypatch.setattr(executor._memory, "move", moving)
    executor.submit(chunk(0, 0, 40, BLOCKS, step=0))
    executor.collect()
    pieces = [(0, executor.transfer.read_kv(BLOCKS, 0, 40))]
    state = executor.transfer.read_state(0)
    for row in (1, 2, 3):  # launched, then recorded, then repeated
        ticket = executor.transfer.write(BLOCKS, pieces, row, state)
        told.clear()
        token(executor, chunk(row, 40, 45, BLOCKS, step=row, after=ticket))
        assert told == [(ticket, kind == "recorded" and row > 1), "copies"]
        executor.transfer.settle()


@pytest.mark.parametrize("lead", [0, 5000, 30_000])
def test_it_is_told_of_when_little_is_left(monkeypatch: pytest.MonkeyPatch, lead: int) -> None:
    monkeypatch.setattr(transfers, "LAYERS_BYTES", 1)
    monkeypatch.setattr(transfers, "LEAD_BYTES", lead)
    transfer, _, _ = make()
    pieces = pieces_of(transfer, 0, 40, 75)
    left = sum(packed.nbytes for _, packed in pieces)
    seen: list[int] = []
    queue_part = transfer._queue_part

    class Passing(Done):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.left = left

        def wait(self) -> None:
            seen.append(self.left)

    def queueing(piece: Any, begin: int, part: torch.Tensor, *rest: Any) -> None:
        nonlocal left
        queue_part(piece, begin, part, *rest)
        left -= part.nbytes

    monkeypatch.setattr(lanes, "Done", Passing)
    monkeypatch.setattr(transfer, "_queue_part", queueing)
    transfer.write(TABLE, pieces, None, {})
    assert left == 0
    (at,) = seen
    most = max(packed.nbytes for _, packed in pieces) * -(-LAYERS // transfer._arrivals.gates) // LAYERS
    assert lead - most < at <= lead
    transfer.settle()


def test_a_restore_that_fails_half_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "LAYERS_BYTES", 1)
    transfer, _, arrivals = make()
    pieces, state = pieces_of(transfer, 0, 40, 75), transfer.read_state(2)
    queue_part, count = transfer._queue_part, 0

    def failing(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == HEADS + 3:
            raise RuntimeError("out of memory")
        queue_part(*args)

    monkeypatch.setattr(transfer, "_queue_part", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        transfer.write(TABLE, pieces, 0, state)
    transfer.settle()
    assert (transfer._arriving, transfer._numbers, transfer._unsettled) == ({}, {}, {})
    assert transfer.write(TABLE, pieces, 0, state) == 2
    assert arrivals._reached.tolist() == [2] * arrivals.gates
    transfer.settle()
    assert (transfer._arriving, transfer._numbers, transfer._unsettled) == ({}, {}, {})


@pytest.mark.parametrize("what", ["a state", "pages", "both"])
def test_it_begins_behind_everything_that_was_submitted(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Whoever had these blocks and this slot before may have a step under way that still writes there."""
    transfer, _, _ = make()
    pieces, state = pieces_of(transfer, 0, 40), transfer.read_state(2)
    told: list[str] = []
    queue_part, add = transfer._queue_part, transfer._add

    def queueing(*args: Any) -> None:
        told.append("pages")
        queue_part(*args)

    def adding(*args: Any) -> None:
        told.append("sum")
        add(*args)

    monkeypatch.setattr(transfer, "_submitted", lambda: Mark("submitted", told))
    monkeypatch.setattr(transfer, "_queue_part", queueing)
    monkeypatch.setattr(transfer, "_add", adding)
    transfer.write(TABLE, [] if what == "a state" else pieces, None if what == "pages" else 0, state)
    assert told[0] == "submitted"
    assert what == "a state" or told[told.index("pages") - 1] == "submitted"
    transfer.settle()
