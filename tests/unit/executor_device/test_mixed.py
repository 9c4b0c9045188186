"""Shapes of small steps with prefill in them, and what the device reads from a step laid out in one."""

from __future__ import annotations

import pytest
import torch

from engram_runtime.executor.batch import step_metadata
from engram_runtime.executor.device.mixed import MixedShape, largest_words, mixed_inputs, mixed_plan, mixed_shape
from engram_runtime.executor.device.tables import RowTables
from engram_runtime.executor.plan import SequencePlan

CPU = torch.device("cpu")


def decode(row: int, start: int, blocks: tuple[int, ...]) -> SequencePlan:
    return SequencePlan(row, start, None, blocks, row, True)


def chunk(row: int, start: int, count: int, blocks: tuple[int, ...], *, sample: bool = True) -> SequencePlan:
    return SequencePlan(row, start, tuple(100 * row + i for i in range(count)), blocks, row, sample)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([(0, 1)], MixedShape(0, 1, 8)),
        ([(500, 40)], MixedShape(0, 1, 48)),
        ([(9, 1), (500, 50)], MixedShape(8, 1, 64)),
        ([(500, 3)] * 16, MixedShape(0, 16, 8)),
        ([(500, 41)] * 16, MixedShape(0, 16, 48)),
        ([(9, 1)] * 9 + [(0, 20)] * 3, MixedShape(20, 4, 32)),
        ([(9, 1)] * 3, MixedShape(8, 0, 0)),
        ([(0, 129)], None),
        ([(0, 128)] * 16, MixedShape(0, 16, 128)),
        ([(0, 128)] * 17, None),
        ([(0, 33)] * 5, None),  # would be filled up to twelve times its tokens
    ],
)
def test_the_smallest_shape_that_wastes_little(lengths: list[tuple[int, int]], shape: MixedShape | None) -> None:
    sequences = [
        decode(row, start, ()) if (count, start > 0) == (1, True) else chunk(row, start, count, ())
        for row, (start, count) in enumerate(lengths)
    ]
    found = mixed_shape(sequences, 20)
    assert found == shape
    assert found is None or found.words <= largest_words(20)


def test_the_device_reads_what_the_host_would_have_told_it() -> None:
    tables = RowTables(6, 8, 50, CPU)
    tables.last.copy_(torch.arange(7) + 40)
    tables.floats[0] = torch.arange(7) / 8
    sequences = [
        decode(3, 20, (7, 8)),
        decode(1, 5, (9,)),
        chunk(0, 30, 5, (1, 2, 3)),
        chunk(4, 0, 17, (11, 12), sample=False),
    ]
    for sequence in sequences:
        for column, block in enumerate(sequence.block_ids):
            tables.blocks[sequence.row, column] = block
    shape = MixedShape(4, 4, 32)
    laid_out = mixed_plan(shape, sequences, tables, 9)
    assert laid_out.places == [0, 1, 4, 5]
    assert laid_out.words.size == shape.words
    inputs, last, feed = mixed_inputs(shape, torch.from_numpy(laid_out.words), tables, 64)
    expected = step_metadata(sequences, CPU)
    meta, places = inputs.meta, torch.tensor(laid_out.places)
    starts = meta.query_start.tolist()
    real = [token for place in laid_out.places for token in range(starts[place], starts[place + 1])]
    assert torch.equal(meta.positions[real], expected.positions)
    assert torch.equal(meta.slots[real], expected.slots)
    assert inputs.ids[real].tolist() == [43, 41, *range(5), *range(400, 417)]
    assert torch.equal(meta.seq_lens[places], expected.seq_lens)
    assert torch.equal(meta.state_slots[places], expected.state_slots)
    assert torch.equal(meta.has_state[places], expected.has_state)
    assert torch.equal(meta.query_start.diff()[places], expected.query_start.diff())
    assert [last[place].item() for place in laid_out.places] == laid_out.last
    assert feed.tolist() == [3, 1, 6, 6, 0, 6, 6, 6]
    assert inputs.floats[0, places].tolist() == [3 / 8, 1 / 8, 0.0, 4 / 8]
    assert inputs.sampled_at[places].tolist() == [21, 6, 35, 17]
    # Everybody else is the spare row with one token of its own.
    others = [2, 3, 6, 7]
    assert meta.seq_lens[others].tolist() == [1] * 4
    assert not meta.has_state[others].any()
    assert meta.state_slots[others].tolist() == [9] * 4
    assert set(meta.slots.tolist()) - set(expected.slots.tolist()) == {50 * 16, -1}
    assert (meta.slots[starts[-1] :] == -1).all()  # tokens of nobody write nothing
    assert len(inputs.ids) == shape.tokens == sum(meta.query_lens_host)
    assert meta.num_decodes == 4
