"""Steps with prefill in them, in fixed shapes that record into graphs like decodes.

A turn of a conversation is some tens of new tokens on a long history, cut where a boundary is captured: launched kernel
by kernel, such a step takes ten times as long as its kernels do; of a small model even one of thousands of tokens takes
longer. So a step is filled up to one of the shapes: decodes, then chunks, then tokens that belong to nobody. Kernels
take the real lengths from the device; the host's numbers, which a graph freezes, are upper bounds (see `StepMetadata`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engram_kernels.metadata import PAGE, StepMetadata
from engram_runtime.executor.device.inputs import DecodeInputs
from engram_runtime.executor.device.tables import RowTables
from engram_runtime.executor.plan import SequencePlan
from engram_runtime.layers.moe import SparseExperts
from engram_runtime.models.base import CausalLM

DECODES = (8, 64)
CHUNKS = (1, 4, 16, 32)
CHUNK_TOKENS = (8, 32, 48, 64, 128)
"""Bounds of short chunks: 8 holds what follows a turn's history, the generation prompt; 48 a short message. Longer ones
are bounded by the total alone."""
TOTALS = (8, 32, 48, *range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 256), *range(4096, 8192, 512))
"""Bounds of the tokens of all chunks together, and so on: eight to sixteen steps from a power of two to the next."""
FREE_TOKENS, MAX_WASTE = 512, 1.25
"""A step may be filled up to so many tokens however few it has, since launching it takes longer than computing them;
above that, to so many times its tokens."""
LAUNCH_SECONDS = 0.6e-3
"""What launching a layer kernel by kernel takes the host: steps of Qwen3-0.6B took 16 to 23 ms beside an H200."""
EXTRA_SECONDS = 0.3e-3
"""And what recurrent states, and experts, add to it: steps of Granite-4.0-H-tiny took 47 to 72 ms."""
FLOPS = 600e12
"""Of long products on a Hopper card; on a slower one a little too little is recorded."""


@dataclass(frozen=True, slots=True)
class MixedShape:
    """`decodes` sequences of one token, then `chunks` sequences of at most `each` tokens, `total` of them together."""

    decodes: int
    chunks: int
    each: int
    total: int

    @property
    def tokens(self) -> int:
        return self.decodes + self.total

    @property
    def sequences(self) -> int:
        return self.decodes + self.chunks

    @property
    def words(self) -> int:
        """int64 words of the step's plan on the device: three lines of tokens, six of sequences, their starts, and the
        restore that the step follows."""
        return 3 * self.tokens + 7 * self.sequences + 2


class MixedShapes:
    """The shapes of an executor: at most `most_decodes` sequences, and `most_tokens` tokens of chunks."""

    def __init__(self, most_decodes: int, most_tokens: int) -> None:
        self._decodes = (*(size for size in DECODES if size < most_decodes), most_decodes)
        self._totals = (*(size for size in _totals(most_tokens) if size < most_tokens), most_tokens)

    @property
    def words(self) -> int:
        """Words that hold the plan of any shape."""
        return MixedShape(self._decodes[-1], CHUNKS[-1], 0, self._totals[-1]).words

    def fit(self, sequences: Sequence[SequencePlan]) -> MixedShape | None:
        """The smallest shape that holds the step; None when there is none, or too much of it would be filled up."""
        decodes = _leading_decodes(sequences)
        lengths = [sequence.num_tokens for sequence in sequences[decodes:]]
        room = _fit(decodes, self._decodes)
        chunks = _fit(len(lengths), CHUNKS)
        if room is None or chunks is None:
            return None
        new = sum(lengths)
        total = _fit(new + chunks - len(lengths), self._totals)  # a chunk of nobody has one token
        if total is None:
            return None
        each = _fit(max(lengths, default=0), CHUNK_TOKENS)
        shape = MixedShape(room, chunks, total if each is None else each, total)
        if chunks * shape.each < total:
            shape = replace(shape, total=chunks * shape.each)
        return shape if shape.tokens <= max(FREE_TOKENS, MAX_WASTE * (decodes + new)) else None


def _totals(most: int) -> Iterator[int]:
    yield from TOTALS
    size = 8192
    while size < most:
        yield size
        size += 1024


def worth_recording(model: CausalLM) -> int:
    """Tokens of a step below which launching its kernels takes longer than running them."""
    extras = model.spec.layer_types.count("mamba") + sum(isinstance(m, SparseExperts) for m in model.layers.modules())
    launching = LAUNCH_SECONDS * model.spec.num_layers + EXTRA_SECONDS * extras
    return int(launching * FLOPS / (2 * model.weights_per_token())) // 64 * 64


def _fit(count: int, sizes: Sequence[int]) -> int | None:
    return 0 if count == 0 else next((size for size in sizes if size >= count), None)


def _leading_decodes(sequences: Sequence[SequencePlan]) -> int:
    return next((i for i, s in enumerate(sequences) if s.num_tokens != 1 or s.start == 0), len(sequences))


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """`words` [shape.words] int64 for the device; each sequence's place in the shape."""

    words: np.ndarray
    places: list[int]


def mixed_plan(
    shape: MixedShape, sequences: Sequence[SequencePlan], tables: RowTables, spare_slot: int, ticket: int = 0
) -> MixedPlan:
    """Lay a step out in a shape; what is left over are the spare row's, one token each. ticket: see `Arrivals`."""
    decodes = _leading_decodes(sequences)
    places = [i if i < decodes else shape.decodes + i - decodes for i in range(len(sequences))]
    tokens = np.zeros((3, shape.tokens), dtype=np.int64)
    tokens[2] = tables.spare_row
    rows = np.empty((6, shape.sequences), dtype=np.int64)
    rows[:] = [[tables.spare_row], [1], [spare_slot], [0], [tables.spare_row], [spare_slot]]
    lengths = np.ones(shape.sequences, dtype=np.int64)
    for place, sequence in zip(places, sequences, strict=True):
        lengths[place] = sequence.num_tokens
    starts = np.concatenate([[0], lengths.cumsum()])
    rows[3] = starts[1:] - 1
    for place, sequence in zip(places, sequences, strict=True):
        first, end = starts[place], starts[place + 1]
        tokens[0, first:end] = -1 if sequence.token_ids is None else sequence.token_ids
        tokens[1, first:end] = np.arange(sequence.start, sequence.start + sequence.num_tokens)
        tokens[2, first:end] = sequence.row
        rows[0, place] = sequence.row
        rows[1, place] = sequence.start + sequence.num_tokens
        rows[2, place] = sequence.state_slot
        rows[5, place] = sequence.written_slot
        if sequence.sample:
            rows[4, place] = sequence.row
    words = np.concatenate([tokens.reshape(-1), rows.reshape(-1), starts, [ticket]])
    return MixedPlan(words, places)


def mixed_inputs(
    shape: MixedShape, plan: Tensor, tables: RowTables, window: int
) -> tuple[DecodeInputs, Tensor, Tensor]:
    """plan [shape.words] on the device -> inputs, last hidden states [R], rows that the sampled tokens go to [R].

    `inputs.rows` and `sampled_at` are [R] of the sequences; a sequence that samples nothing feeds the spare row.
    """
    count = shape.sequences
    border = 3 * shape.tokens
    tokens, positions, owners = plan[:border].view(3, shape.tokens).unbind(0)
    rows, ends, state_slots, last, feed, targets = plan[border : border + 6 * count].view(6, count).unbind(0)
    query_start = plan[border + 6 * count : shape.words - 1].int()
    seq_lens = ends.int()
    slots = tables.blocks[owners, positions // PAGE].long() * PAGE + positions % PAGE
    meta = StepMetadata(
        positions=positions,
        slots=torch.where(torch.arange(shape.tokens, device=plan.device) < query_start[-1], slots, -1),
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=tables.blocks[rows],
        num_decodes=shape.decodes,
        max_query_len=max(1, shape.each),
        max_seq_len=window,
        state_slots=state_slots,
        has_state=seq_lens > query_start.diff(),
        query_lens_host=(1,) * shape.decodes + (shape.each,) * shape.chunks,
        seq_lens_host=(window,) * count,
        chunk_tokens_host=shape.total,
        state_targets=targets,
    )
    ids = torch.where(tokens < 0, tables.last[owners], tokens)
    return DecodeInputs(ids, meta, rows, ends, tables.ints[:, rows], tables.floats[:, rows]), last, feed
