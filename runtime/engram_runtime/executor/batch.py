"""Turns the plain data of a plan into the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from engram_kernels.metadata import PAGE, StepMetadata
from engram_runtime.executor.plan import SequencePlan


def step_metadata(sequences: Sequence[SequencePlan], device: torch.device) -> StepMetadata:
    """Metadata of one mixed batch; decodes (one token, start > 0) must come first."""
    query_lens = tuple(sequence.num_tokens for sequence in sequences)
    seq_lens = tuple(sequence.start + sequence.num_tokens for sequence in sequences)
    num_decodes = 0
    for sequence in sequences:
        if sequence.num_tokens != 1 or sequence.start == 0:
            break
        num_decodes += 1
    positions: list[int] = []
    slots: list[int] = []
    for sequence, end in zip(sequences, seq_lens, strict=True):
        positions.extend(range(sequence.start, end))
        blocks = sequence.block_ids
        slots.extend(blocks[position // PAGE] * PAGE + position % PAGE for position in range(sequence.start, end))
    width = max(len(sequence.block_ids) for sequence in sequences)
    tables = [list(sequence.block_ids) + [0] * (width - len(sequence.block_ids)) for sequence in sequences]

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepMetadata(
        positions=tensor(positions, torch.int64),
        slots=tensor(slots, torch.int64),
        query_start=tensor([0, *accumulate(query_lens)], torch.int32),
        seq_lens=tensor(seq_lens, torch.int32),
        block_tables=tensor(tables, torch.int32),
        num_decodes=num_decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        state_slots=tensor([sequence.state_slot for sequence in sequences], torch.int64),
        has_state=tensor([sequence.start > 0 for sequence in sequences], torch.bool),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
        state_targets=tensor([sequence.written_slot for sequence in sequences], torch.int64),
    )
