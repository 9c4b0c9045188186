"""The pieces of the device executor one by one: packing, tables, gathering, seen tokens, ways of sampling, sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engram_kernels.metadata import PAGE
from engram_runtime.executor.device import graphs as graph_module
from engram_runtime.executor.device.gather import bring as bring_kernel
from engram_runtime.executor.device.gather import change, gather
from engram_runtime.executor.device.graphs import StepGraphs, batch_sizes, why_not_recorded
from engram_runtime.executor.device.inputs import decode_lines, gather_reference
from engram_runtime.executor.device.mixed import MixedShape
from engram_runtime.executor.device.sampling import Way, way_of
from engram_runtime.executor.device.staging import Bring, Packer, float_bits
from engram_runtime.executor.device.tables import HostRow, RowTables, SeenTokens, change_reference, open_words
from engram_runtime.executor.plan import RowOpen, RowSampling, SequencePlan
from tests.support.device_step import Again

CPU = torch.device("cpu")


def opened(row: int, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **sampling: Any) -> RowOpen:
    return RowOpen(row, RowSampling(**sampling), prompt, output)


def decode(row: int, start: int, blocks: tuple[int, ...], slot: int = 0) -> SequencePlan:
    return SequencePlan(row, start, None, blocks, slot, True)


@pytest.mark.parametrize("bring", [None, bring_kernel], ids=["copied", "brought by a kernel"])
def test_arrays_of_any_kind_travel_in_one_copy(bring: Bring | None) -> None:
    packer = Packer(CPU, bring)
    first, nothing, floats = packer.add([1, -5]), packer.add([]), packer.add(float_bits([0.25, -1e30]))
    packer.flush()
    assert packer.take(first).tolist() == [1, -5]
    assert packer.take(nothing).tolist() == []
    assert packer.take(floats).view(torch.float64).tolist() == [0.25, -1e30]
    assert (packer.host is None) == (bring is None)  # the host's memory is kept for a kernel
    aligned = [packer.take(part).data_ptr() % 16 == 0 for part in (first, floats)]
    assert all(aligned), "a kernel would be compiled once more for this array"
    with pytest.raises(RuntimeError, match="before its copy"):
        Packer(CPU).take(first)


@pytest.mark.parametrize("count", [0, 2, 1024, 3001])
def test_a_plan_of_any_length_is_brought_to_where_a_step_reads_it(count: int) -> None:
    packer, place = Packer(CPU, bring_kernel), torch.full((4000,), -1)
    where = packer.add(np.arange(count))
    packer.flush(into=place)
    assert packer.take(where).tolist() == list(range(count))
    assert (place[len(packer) :] == -1).all()


def test_an_opened_row_holds_what_was_asked_for() -> None:
    tables = RowTables(3, 4, 9, CPU)
    words = open_words(opened(1, (5,), (7, 8), temperature=0.5, seed=-3, top_k=11, min_p=0.125, top_p=0.75))
    change_reference(tables, torch.tensor(words + open_words(opened(2))), torch.tensor([], dtype=torch.int64))
    assert tables.last.tolist()[1:3] == [8, 0]
    assert tables.ints[:, 1].tolist() == [-3, 11]
    assert tables.floats[:, 1].tolist() == [0.5, 0.75, 0.125, 1.0, 0.0, 0.0]
    assert tables.floats[:, 2].tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def test_only_new_blocks_are_sent() -> None:
    row = HostRow(opened(0))
    assert row.new_blocks((4, 5)) == (0, (4, 5))
    assert row.new_blocks((4, 5)) == (2, ())
    assert row.new_blocks((4, 5, 6)) == (2, (6,))
    assert row.new_blocks((1, 2, 3, 8)) == (0, (1, 2, 3, 8))  # another table: all of it


def test_a_batch_is_filled_up_with_the_spare_row() -> None:
    tables = RowTables(8, 4, 30, CPU)
    rows = {3: HostRow(opened(3)), 5: HostRow(opened(5))}
    rows[3].new_blocks((7,))
    ahead = replace(decode(5, 40, (1, 2, 3), 1), state_target=3)
    lines, more = decode_lines([decode(3, 16, (7, 8), 2), ahead], rows, 4, tables, 6)
    assert lines.tolist() == [
        [3, 5, 8, 8], [16, 40, 0, 0], [2, 1, 6, 6], [1, 4, 4, 4], [8, 30, 30, 30], [2, 3, 6, 6]
    ]  # fmt: skip
    assert [lines.tolist() for lines in more] == [[[5, 5, 5], [0, 1, 2], [1, 2, 3]]]  # rows, columns, blocks


@pytest.mark.parametrize(("rows", "updates"), [((), 5), ((3, 0), 0), ((1,), 1), ((5, 2, 4), 2500)])
def test_the_changing_kernel_equals_its_reference(rows: tuple[int, ...], updates: int) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    words = [
        word
        for row in rows
        for word in open_words(
            opened(row, (1,), (row + 7,), temperature=row / 3, seed=-(1 << 40), top_k=row, top_p=0.3)
        )
    ]
    places = torch.randperm(6 * 700, generator=generator)[:updates]
    lines = torch.stack([places // 700, places % 700, torch.randint(0, 1 << 30, (updates,), generator=generator)])
    found, expected = RowTables(6, 700, 77, CPU), RowTables(6, 700, 77, CPU)
    for tables, function in ((found, change), (expected, change_reference)):
        function(tables, torch.tensor(words, dtype=torch.int64), lines.reshape(-1))
    for name in ("last", "ints", "floats", "blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert not rows or found.last[rows[0]] == rows[0] + 7


def test_the_gathering_kernel_equals_its_reference() -> None:
    generator = torch.Generator().manual_seed(4)
    tables = RowTables(6, 2100, 77, CPU)
    tables.last.random_(0, 500, generator=generator)
    tables.ints.random_(-(1 << 40), 1 << 40, generator=generator)
    tables.floats.uniform_(generator=generator)
    tables.blocks[:-1].random_(0, 77, generator=generator)
    positions = [0, 5, 2099 * PAGE + 3, 1100 * PAGE, 0]
    columns = [tables.width, tables.width, tables.width, 1100, tables.width]
    tables.last[6] = 499  # the spare row feeds 0, whatever was sampled for it
    plan = torch.tensor([[2, 0, 4, 1, 6], positions, [0] * 5, columns, [77, 77, 77, 60, 77], [0] * 5])
    before = tables.blocks.clone()
    args = (tables.last, tables.ints, tables.floats)
    expected = gather_reference(plan, *args, before)
    found = gather(plan, *args, tables.blocks)
    assert found[0].tolist()[4] == 0
    assert torch.equal(before[:, :-1], tables.blocks[:, :-1])
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if index == 5:  # block tables: defined up to each sequence's last block
            for i, position in enumerate(positions):
                assert torch.equal(a[i, : position // PAGE + 1], b[i, : position // PAGE + 1])
        else:
            assert a.dtype == b.dtype
            assert torch.equal(a, b[: a.shape[0]])


def test_seen_tokens_are_counted_on_the_device() -> None:
    seen = SeenTokens(3, 20, 10, CPU)
    seen.open(opened(1, (4, 4, 9), (9, 5)))
    seen.open(opened(0, (2,)))
    rows = torch.tensor([1, 0])
    for tokens in ([9, 2], [7, 3], [7, 2]):
        seen.append(rows, torch.tensor(tokens))
    places, ids, counts = seen.listed(rows, torch.tensor([2, 5]), 7, 6)
    entries = {(p, i): c for p, i, c in zip(places.tolist(), ids.tolist(), counts.tolist(), strict=True) if p != 6}
    assert entries == {(2, 4): 0, (2, 9): 2, (2, 5): 1, (2, 7): 2, (5, 2): 2, (5, 3): 1}


@pytest.mark.parametrize(
    ("styles", "way"),
    [
        ([{"temperature": 0.0}], Way.GREEDY),
        ([{"temperature": 0.0, "top_p": 0.5}], Way.GREEDY),
        ([{"temperature": 0.0}, {"temperature": 1.0}], Way.DRAW),
        ([{"temperature": 1.0, "top_k": 4}, {"temperature": 1.0}], Way.CUT),
        ([{"temperature": 0.0, "logprobs": 0}], Way.GREEDY),
        ([{"temperature": 0.0}, {"logprobs": 2}], Way.HIDDEN),
        ([{"logit_bias": ((1, 2.0),)}], Way.HIDDEN),
        ([{"presence_penalty": 0.1}], Way.HIDDEN),
        ([{"min_tokens": 3}], Way.HIDDEN),
    ],
)
def test_the_cheapest_way_that_serves_everybody(styles: list[dict[str, Any]], way: Way) -> None:
    assert way_of([HostRow(opened(i, **style)) for i, style in enumerate(styles)]) is way


def test_sizes_waste_little_and_end_with_the_most() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(5) == (1, 2, 4, 5)
    assert batch_sizes(64) == (1, 2, 4, 8, 16, 32, 64)
    assert batch_sizes(300) == (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 300)
    assert batch_sizes(512)[-4:] == (320, 384, 448, 512)


def test_the_largest_size_is_recorded_first_and_each_once() -> None:
    built: list[tuple[int, Way]] = []
    rested: list[int] = []

    def build(size: int, way: Way) -> Any:
        built.append((size, way))
        return lambda: ()

    graphs = StepGraphs(16, Again(), build, rested.append)
    assert [graphs.size_for(n) for n in (1, 3, 16)] == [1, 4, 16]
    for size in (2, 2, 16, 4):
        graphs.get(size, Way.DRAW)
    assert built == [(16, Way.DRAW), (2, Way.DRAW), (4, Way.DRAW)]
    assert rested == [16, 2, 4]
    assert len(graphs) == 3


def mixed_graphs() -> tuple[StepGraphs, list[Any], Callable[[MixedShape], bool]]:
    """Graphs, what was recorded, and a step with prompts: whether it was taken from a recording."""
    built: list[Any] = []

    def build(shape: Any, way: Way) -> Any:
        built.append(shape)
        return lambda: ()

    graphs = StepGraphs(4, Again(), build, lambda shape: None)

    def step(shape: MixedShape) -> bool:
        served = graphs.serves(shape, Way.GREEDY)
        if served:
            graphs.get(shape, Way.GREEDY)
        return served

    return graphs, built, step


def shape_of(number: int) -> MixedShape:
    return MixedShape(0, 1, 8 * number, 8 * number)


def test_a_mixed_shape_is_recorded_when_it_comes_again() -> None:
    graphs, built, step = mixed_graphs()
    assert not step(shape_of(1))
    assert not graphs.serves(shape_of(1), Way.DRAW)  # sampled in another way it is another recording
    assert not built
    assert [step(shape_of(1)) for _ in range(3)] == [True] * 3
    assert built == [shape_of(1)]


def test_mixed_recordings_in_use_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "MOST_MIXED", 2)
    monkeypatch.setattr(graph_module, "IDLE", 6)
    graphs, built, step = mixed_graphs()
    graphs.get(4, Way.GREEDY)
    for number in (1, 1, 2, 2):
        step(shape_of(number))
    served = [step(shape_of(number)) for number in (3, 1, 3, 2, 3, 1, 3)]
    assert served == [False, True, False, True, False, True, False]
    assert built == [4, shape_of(1), shape_of(2)]
    for _ in range(5):
        step(shape_of(1))
    assert step(shape_of(3)), "the second was not used for more than six steps"
    assert built == [4, shape_of(1), shape_of(2), shape_of(3)]
    assert len(graphs) == 3
    assert not step(shape_of(2))
    assert step(shape_of(1))
    assert len(built) == 4


def test_counting_begins_anew_when_there_are_too_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "MOST_SEEN", 3)
    _, built, step = mixed_graphs()
    assert not any(step(shape_of(number)) for number in (1, 2, 3, 4, 1))
    assert step(shape_of(1))
    assert built == [shape_of(1)]


def test_no_graphs_on_a_cpu() -> None:
    assert why_not_recorded(CPU, torch.float32, None, None) == "there are no CUDA graphs on cpu"
