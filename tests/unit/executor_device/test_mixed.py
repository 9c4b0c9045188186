"""Shapes of small steps with prefill in them, and what the device reads from a step laid out in one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.executor.batch import step_metadata
from engram_runtime.executor.device.mixed import MixedShape, MixedShapes, mixed_inputs, mixed_plan
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
        ([(0, 1)], MixedShape(0, 1, 8, 8)),
        ([(500, 40)], MixedShape(0, 1, 48, 48)),
        ([(9, 1), (500, 50)], MixedShape(8, 1, 64, 64)),
        ([(500, 3)] * 16, MixedShape(0, 16, 8, 48)),
        ([(500, 41)] * 16, MixedShape(0, 16, 48, 704)),
        ([(9, 1)] * 9 + [(0, 20)] * 3, MixedShape(20, 4, 32, 64)),
        ([(0, 20), (0, 31), (0, 32), (0, 32)], MixedShape(0, 4, 32, 128)),
        ([(9, 1)] * 3, MixedShape(8, 0, 0, 0)),
        ([(0, 128)] * 17, MixedShape(0, 32, 128, 2200)),
        ([(0, 33)] * 5, MixedShape(0, 16, 48, 192)),
        ([(0, 129)], MixedShape(0, 1, 192, 192)),
        ([(0, 512)] * 4, MixedShape(0, 4, 2048, 2048)),
        ([(9, 1)] * 20 + [(700, 300), (0, 20)], MixedShape(20, 4, 384, 384)),
        ([(0, 2200)], MixedShape(0, 1, 2200, 2200)),
        ([(0, 2201)], None),
        ([(0, 8)] * 33, None),
    ],
)
def test_the_smallest_shape_that_wastes_little(lengths: list[tuple[int, int]], shape: MixedShape | None) -> None:
    sequences = [
        decode(row, start, ()) if (count, start > 0) == (1, True) else chunk(row, start, count, ())
        for row, (start, count) in enumerate(lengths)
    ]
    shapes = MixedShapes(20, 2200)
    found = shapes.fit(sequences)
    assert found == shape
    assert found is None or found.words <= shapes.words


def test_a_step_is_not_filled_up_to_much_more_than_it_has() -> None:
    decodes = [decode(row, 9, ()) for row in range(65)]
    assert MixedShapes(256, 2200).fit([*decodes, chunk(65, 0, 20, ())]) == MixedShape(256, 1, 32, 32)
    assert MixedShapes(512, 2200).fit([*decodes, chunk(65, 0, 20, ())]) is None
    assert MixedShapes(512, 2200).fit([*decodes, chunk(65, 0, 2000, ())]) == MixedShape(512, 1, 2048, 2048)


@given(
    decodes=st.integers(0, 70),
    lengths=st.lists(st.integers(1, 600), max_size=40),
    most=st.tuples(st.integers(1, 70), st.integers(1, 10_000)),
)
def test_a_shape_holds_its_step(decodes: int, lengths: list[int], most: tuple[int, int]) -> None:
    sequences = [decode(row, 9, (1,)) for row in range(decodes)]
    sequences += [chunk(decodes + i, 0, length, (1,)) for i, length in enumerate(lengths)]
    shapes = MixedShapes(*most)
    shape = shapes.fit(sequences)
    if shape is None:
        return
    assert shape.decodes >= decodes
    assert shape.each >= max(lengths, default=0)
    assert shape.decodes <= most[0]
    assert shape.total <= most[1]
    assert shape.total >= sum(lengths) + shape.chunks - len(lengths)
    assert shape.words <= shapes.words
    tables = RowTables(120, 40, 5, CPU)
    laid_out = mixed_plan(shape, sequences, tables, 0)
    assert laid_out.words.size == shape.words
    meta = mixed_inputs(shape, torch.from_numpy(laid_out.words), tables, 10_000)[0].meta
    assert meta.query_start[-1] <= shape.tokens == meta.positions.numel()
    for size in (16, 128, 512):
        assert meta.chunk_blocks(size) >= sum(-(-length // size) for length in lengths)


def test_the_bound_of_blocks_is_the_smaller_of_two() -> None:
    blocks = tuple(range(20))
    step = [decode(2, 5, blocks), chunk(0, 0, 300, blocks), chunk(1, 0, 300, blocks)]
    meta = replace(step_metadata(step, CPU), chunk_tokens_host=400)
    assert [meta.chunk_blocks(size) for size in (128, 512)] == [5, 2]
    assert replace(meta, chunk_tokens_host=None).chunk_blocks(128) == 6
    assert meta.prefills().chunk_blocks(128) == 5
    assert meta.decodes().chunk_blocks(128) == 0


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
    shape = MixedShape(4, 4, 32, 40)
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
    assert [last[place].item() for place in laid_out.places] == [starts[place + 1] - 1 for place in laid_out.places]
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
    assert len(inputs.ids) == shape.tokens == 44
    assert meta.query_lens_host == (1,) * 4 + (32,) * 4
    assert meta.num_decodes == 4
