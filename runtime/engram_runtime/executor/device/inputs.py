"""From a plan to the tensors of a step: decodes from five numbers a sequence, mixed steps from their tokens.

Nothing here waits for the device, and what a decode step computes depends on nothing but device memory, so it records
into a graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engram_kernels.metadata import PAGE, StepMetadata
from engram_runtime.executor.device.staging import Bring, Packer
from engram_runtime.executor.device.tables import Change, HostRow, RowTables, change_reference, update_lines
from engram_runtime.executor.plan import SequencePlan

Gather = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]

DECODE_LINES = 6
"""A decode batch on its way to the device, [6, batch] int64: row, position, state slot, column and block that its table
gains (the column `width` for none), slot of the new state."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """`rows`, `sampled_at` [batch] int64, `ints` [2, batch], `floats` [3 or more, batch]: as in `RowTables`."""

    ids: Tensor
    meta: StepMetadata
    rows: Tensor
    sampled_at: Tensor
    ints: Tensor
    floats: Tensor


def decode_lines(
    sequences: Sequence[SequencePlan],
    rows: Mapping[int, HostRow],
    batch: int,
    tables: RowTables,
    spare_slot: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """[6, batch] int64, filled up with the spare row, and the updates (`update_lines`) that do not fit there."""
    lines = np.empty((DECODE_LINES, batch), dtype=np.int64)
    lines[:, len(sequences) :] = [
        [tables.spare_row],
        [0],
        [spare_slot],
        [tables.width],
        [tables.spare_block],
        [spare_slot],
    ]
    more: list[np.ndarray] = []
    columns, blocks = [], []
    for sequence in sequences:
        row = rows[sequence.row]
        if row.knows(sequence.block_ids):
            columns.append(tables.width)
            blocks.append(tables.spare_block)
            continue
        first, new = row.new_blocks(sequence.block_ids)
        if len(new) == 1:
            columns.append(first)
            blocks.append(new[0])
        else:
            columns.append(tables.width)
            blocks.append(tables.spare_block)
            more.append(update_lines(sequence.row, first, new))
    count = len(sequences)
    lines[0, :count] = [sequence.row for sequence in sequences]
    lines[1, :count] = [sequence.start for sequence in sequences]
    lines[2, :count] = [sequence.state_slot for sequence in sequences]
    lines[3, :count] = columns
    lines[4, :count] = blocks
    lines[5, :count] = [sequence.written_slot for sequence in sequences]
    return lines, more


def gather_reference(plan: Tensor, last: Tensor, ints: Tensor, floats: Tensor, blocks: Tensor) -> tuple[Tensor, ...]:
    """plan [6, batch] and the row tables -> ids, slots, seq_lens, sampled_at, has_state (uint8), block tables, ints,
    floats; the plan's blocks are added to the tables."""
    rows, positions, _, columns, new, _ = plan.unbind(0)
    blocks[rows, columns] = new.int()
    slots = blocks[rows, positions // PAGE].long() * PAGE + positions % PAGE
    ends = positions + 1
    has_state = (positions > 0).to(torch.uint8)
    ids = torch.where(rows < last.shape[0] - 1, last[rows], 0)  # the spare row feeds 0
    return ids, slots, ends.int(), ends, has_state, blocks[rows], ints[:, rows], floats[:, rows]


def resolve_kernels(device: torch.device) -> tuple[Gather, Change, Bring | None]:
    """The Triton kernels on a GPU; imported here by name, because other machines need not have triton."""
    if device.type != "cuda":
        return gather_reference, change_reference, None
    loaded = importlib.import_module("engram_runtime.executor.device.gather")
    return loaded.gather, loaded.change, loaded.bring


def decode_inputs(gather: Gather, plan: Tensor, tables: RowTables, query_start: Tensor, window: int) -> DecodeInputs:
    """plan [6, batch] on the device -> the step's inputs; adds the plan's blocks to the tables.

    query_start: arange(batch + 1) int32. window: longest a sequence may get (stands in for host lengths, which a graph
    cannot know).
    """
    rows, positions, state_slots, _, _, state_targets = plan.unbind(0)
    ids, slots, seq_lens, sampled_at, has_state, block_tables, ints, floats = gather(
        plan, tables.last, tables.ints, tables.floats, tables.blocks
    )
    batch = plan.shape[1]
    meta = StepMetadata(
        positions=positions,
        slots=slots,
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=block_tables,
        num_decodes=batch,
        max_query_len=1,
        max_seq_len=window,
        state_slots=state_slots,
        has_state=has_state.view(torch.bool),
        query_lens_host=(1,) * batch,
        seq_lens_host=(window,) * batch,
        state_targets=state_targets,
    )
    return DecodeInputs(ids, meta, rows, sampled_at, ints, floats)


class MixedInputs:
    """A step of prefill chunks and decodes: `pack` on the host, `build` once the packer's copy was started."""

    def __init__(self, sequences: Sequence[SequencePlan], packer: Packer) -> None:
        self._query_lens = tuple(sequence.num_tokens for sequence in sequences)
        self._seq_lens = tuple(sequence.start + sequence.num_tokens for sequence in sequences)
        self._num_decodes = next(
            (i for i, s in enumerate(sequences) if s.num_tokens != 1 or s.start == 0), len(sequences)
        )
        self._width = max(len(sequence.block_ids) for sequence in sequences)
        tokens: list[int] = []
        for sequence in sequences:
            tokens.extend((-1,) if sequence.token_ids is None else sequence.token_ids)
        starts = np.array([sequence.start for sequence in sequences], dtype=np.int64)
        lengths = np.array(self._query_lens, dtype=np.int64)
        query_start = np.concatenate([[0], lengths.cumsum()])
        owners = np.repeat(np.arange(len(sequences)), lengths)
        positions = np.arange(len(tokens)) - query_start[owners] + starts[owners]
        self._parts = [
            packer.add(part)
            for part in (
                tokens,
                positions,
                owners,
                query_start,
                self._seq_lens,
                [sequence.row for sequence in sequences],
                [sequence.state_slot for sequence in sequences],
                [sequence.written_slot for sequence in sequences],
                query_start[1:] - 1,
            )
        ]

    def build(self, packer: Packer, tables: RowTables) -> tuple[Tensor, StepMetadata, Tensor]:
        """(ids [T], metadata, where each sequence's last token is [S]); the tables must know the step's blocks."""
        tokens, positions, owners, query_start, seq_lens, rows, state_slots, targets, ends = map(
            packer.take, self._parts
        )
        owner_rows = rows[owners]
        # -1 stands for the token sampled last, which only the device knows.
        ids = torch.where(tokens < 0, tables.last[owner_rows], tokens)
        slots = tables.blocks[owner_rows, positions // PAGE].long() * PAGE + positions % PAGE
        seq_lens = seq_lens.int()
        query_start = query_start.int()
        meta = StepMetadata(
            positions=positions,
            slots=slots,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=tables.blocks[rows, : self._width],
            num_decodes=self._num_decodes,
            max_query_len=max(self._query_lens),
            max_seq_len=max(self._seq_lens),
            state_slots=state_slots,
            has_state=seq_lens > query_start.diff(),
            query_lens_host=self._query_lens,
            seq_lens_host=self._seq_lens,
            state_targets=targets,
        )
        return ids, meta, ends
