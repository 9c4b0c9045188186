"""What every open row is, kept on the device: last token, sampling parameters, block table, tokens seen.

Rows live as long as their sequence, so a decode step sends almost nothing: which rows, where they are, and a block now
and then. One spare row (with a spare block and state slot) fills a batch up to the size its graph was recorded for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engram_runtime.executor.device.staging import Packer, float_bits
from engram_runtime.executor.plan import RowOpen, RowSampling, SequencePlan

TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
"""Lines of `RowTables.floats`."""
SEED, TOP_K = range(2)
"""Lines of `RowTables.ints`."""
OPEN_WORDS = 10
"""int64 words that describe an opened row: row, last token, the ints, the floats."""


class RowTables:
    """`rows` rows of at most `width` blocks; row `rows` is the spare one, column `width` takes updates of nothing."""

    def __init__(self, rows: int, width: int, spare_block: int, device: torch.device) -> None:
        self.spare_row, self.width, self.spare_block = rows, width, spare_block
        self.last = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """[rows + 1], the token a decode feeds."""
        self.ints = torch.zeros(2, rows + 1, dtype=torch.int64, device=device)
        self.floats = torch.zeros(6, rows + 1, dtype=torch.float32, device=device)
        self.floats[TOP_P] = 1.0
        self.floats[REPETITION] = 1.0
        self.blocks = torch.full((rows + 1, width + 1), spare_block, dtype=torch.int32, device=device)
        """[rows + 1, width + 1] block tables."""


Change = Callable[[RowTables, Tensor, Tensor], None]


def change_reference(tables: RowTables, opens: Tensor, updates: Tensor) -> None:
    """Open rows and extend block tables. opens [n * OPEN_WORDS] int64 as `open_words` made them; updates [3 * m] int64:
    rows, then columns, then blocks (see `update_lines`). Both may be empty."""
    table = opens.view(-1, OPEN_WORDS)
    rows = table[:, 0]
    tables.last[rows] = table[:, 1]
    tables.ints[:, rows] = table[:, 2:4].T
    tables.floats[:, rows] = table[:, 4:].contiguous().view(torch.float64).T.float()
    rows, columns, blocks = updates.view(3, -1)
    tables.blocks[rows, columns] = blocks.int()


def open_words(opened: RowOpen) -> list[int]:
    """An opened row as OPEN_WORDS words."""
    s = opened.sampling
    floats = (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    last = opened.output_ids[-1] if opened.output_ids else 0
    return [opened.row, last, s.seed, s.top_k, *float_bits(floats)]


class HostRow:
    """What the host has to remember of an open row: it never knows the newest token, and does not need it."""

    __slots__ = ("blocks", "generated", "last_block", "output_ids", "prompt_ids", "sampling")

    def __init__(self, opened: RowOpen) -> None:
        self.sampling: RowSampling = opened.sampling
        self.prompt_ids = opened.prompt_ids
        self.output_ids = opened.output_ids
        self.generated = len(opened.output_ids)
        """Tokens sampled by the steps submitted so far."""
        self.blocks = 0
        """Blocks the device knows."""
        self.last_block = -1

    def knows(self, block_ids: Sequence[int]) -> bool:
        """Whether the device knows all of these blocks: so it does for fifteen decodes of sixteen."""
        return len(block_ids) == self.blocks and block_ids[-1] == self.last_block

    def new_blocks(self, block_ids: Sequence[int]) -> tuple[int, Sequence[int]]:
        """(first column, blocks) that the device does not know yet; a table only ever grows while its row is open."""
        known = self.blocks
        if known and (len(block_ids) < known or block_ids[known - 1] != self.last_block):
            known = 0
        self.blocks, self.last_block = len(block_ids), block_ids[-1]
        return known, block_ids[known:]

    def block_updates(self, sequence: SequencePlan) -> list[np.ndarray]:
        """The same as `update_lines`; [] where there is nothing new."""
        first, new = self.new_blocks(sequence.block_ids)
        return [update_lines(sequence.row, first, new)] if len(new) else []


def update_lines(row: int, first: int, blocks: Sequence[int]) -> np.ndarray:
    """[3, n] int64: row, column from `first` on, block."""
    lines = np.empty((3, len(blocks)), dtype=np.int64)
    lines[0] = row
    lines[1] = np.arange(first, first + len(blocks))
    lines[2] = blocks
    return lines


class SeenTokens:
    """Tokens of prompt and output of rows that use a penalty, with their counts; exists once somebody asks for one.

    Rows are counted dense [V] for the update and listed sparse for the sampler, which takes (row, id, count) triples.
    """

    def __init__(self, rows: int, vocab: int, capacity: int, device: torch.device) -> None:
        self._device = device
        self._counts = torch.zeros(rows + 1, vocab, dtype=torch.int32, device=device)
        """0: never seen; otherwise 1 + times generated."""
        self._ids = torch.zeros(rows + 1, capacity + 1, dtype=torch.int64, device=device)
        self._used = torch.zeros(rows + 1, dtype=torch.int64, device=device)

    def open(self, opened: RowOpen) -> None:
        counts = Counter(opened.output_ids)
        for token in opened.prompt_ids:
            counts.setdefault(token, 0)
        packer = Packer(self._device)
        where = packer.add(list(counts)), packer.add(list(counts.values()))
        packer.flush()
        ids, times = (packer.take(part) for part in where)
        row, size = opened.row, len(counts)
        self._counts[row].zero_()
        self._counts[row].scatter_(0, ids, (times + 1).int())
        self._ids[row, :size] = ids
        self._used[row : row + 1].fill_(size)

    def append(self, rows: Tensor, tokens: Tensor) -> None:
        """tokens [n] were sampled for the distinct rows [n]."""
        times = self._counts[rows, tokens]
        new = times == 0
        used = self._used[rows]
        self._ids[rows, used] = tokens
        self._used[rows] = used + new
        self._counts[rows, tokens] = times + 1 + new

    def listed(self, rows: Tensor, places: Tensor, bound: int, nowhere: int) -> tuple[Tensor, Tensor, Tensor]:
        """`SamplingTensors.seen` of rows [n] that are rows `places` [n] of the logits.

        bound: at least as many as any of them has seen. The lists are padded with entries of row `nowhere`, which
        must be one that nobody reads: how many tokens a row has seen is known to the device only.
        """
        valid = torch.arange(bound, device=self._device) < self._used[rows][:, None]
        ids = torch.where(valid, self._ids[rows, :bound], 0)
        times = self._counts[rows[:, None], ids] - 1
        places = torch.where(valid, places[:, None], nowhere)
        return places.flatten(), ids.flatten(), times.flatten()
