"""Drives a model step by step as an executor does, for tests that need no engine: random blocks, chunks and batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engram_kernels import PAGE, StepMetadata
from engram_runtime.models.base import CausalLM
from engram_runtime.models.caches import Caches


@dataclass
class Row:
    """One sequence: its tokens, how many are computed, its blocks (in random places) and its state slot."""

    tokens: list[int]
    blocks: list[int]
    slot: int
    done: int = 0
    hidden: list[torch.Tensor] = field(default_factory=list)


class Stepper:
    """Holds caches full of garbage, so that reading anything that was not written shows."""

    def __init__(self, model: CausalLM, *, num_blocks: int = 128, slots: int = 8, seed: int = 0) -> None:
        spec = model.spec
        dtype = model.embed_tokens.weight.dtype
        generator = torch.Generator().manual_seed(seed)
        self.model = model
        self.random = random.Random(seed)
        shape = (2, num_blocks, spec.num_kv_heads, PAGE, spec.head_dim)
        self.caches = Caches(
            kv=[100 * torch.randn(shape, generator=generator).to(dtype) for _ in range(spec.num_attention_layers)]
        )
        if spec.state is not None:
            state = spec.state
            ssm = 100 * torch.randn(slots, state.num_layers, *state.ssm_shape, generator=generator)
            self.caches.ssm = ssm.to(getattr(torch, state.ssm_dtype))
            conv = 100 * torch.randn(slots, state.num_layers, *state.conv_shape, generator=generator)
            self.caches.conv = conv.to(dtype)
        self._free_blocks = list(range(1, num_blocks))
        self._free_slots = list(range(slots))
        self.random.shuffle(self._free_blocks)
        self.random.shuffle(self._free_slots)

    def row(self, tokens: Sequence[int], capacity: int | None = None) -> Row:
        """A new sequence with room for `capacity` tokens (default: just its own)."""
        count = -(-(capacity or len(tokens)) // PAGE)
        blocks = [self._free_blocks.pop() for _ in range(count)]
        return Row(list(tokens), blocks, self._free_slots.pop())

    @torch.no_grad()
    def step(self, work: Sequence[tuple[Row, int]]) -> None:
        """Compute the next `count` tokens of each row in one batch, decodes first."""
        ordered = sorted(work, key=lambda item: not (item[1] == 1 and item[0].done > 0))
        meta, ids = _metadata(ordered)
        hidden = self.model(ids, meta, self.caches)
        start = 0
        for row, count in ordered:
            row.hidden.append(hidden[start : start + count])
            row.done += count
            start += count

    def run(self, rows: Sequence[Row], *, max_chunk: int = 40) -> None:
        """Compute all rows to their end in random batches of random chunks."""
        while unfinished := [row for row in rows if row.done < len(row.tokens)]:
            chosen = self.random.sample(unfinished, self.random.randint(1, len(unfinished)))
            work = []
            for row in chosen:
                left = len(row.tokens) - row.done
                count = 1 if self.random.random() < 0.3 else self.random.randint(1, max_chunk)
                work.append((row, min(left, count)))
            self.step(work)

    @torch.no_grad()
    def ends(self, work: Sequence[tuple[Row, int]]) -> torch.Tensor:
        """As `step`, with a last layer that computes each row's last token alone: [rows, M], in the order of `work`,
        which has decodes first."""
        meta, ids = _metadata(work)
        hidden: torch.Tensor = self.model(ids, meta, self.caches, meta.query_start[1:].long() - 1)
        for row, count in work:
            row.done += count
        return hidden

    @torch.no_grad()
    def logits(self, row: Row) -> torch.Tensor:
        """[tokens computed, V] fp32."""
        return self.model.logits(torch.cat(row.hidden))


def _metadata(work: Sequence[tuple[Row, int]]) -> tuple[StepMetadata, torch.Tensor]:
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for row, count in work:
        for position in range(row.done, row.done + count):
            ids.append(row.tokens[position])
            positions.append(position)
            slots.append(row.blocks[position // PAGE] * PAGE + position % PAGE)
        starts.append(starts[-1] + count)
    seq_lens = tuple(row.done + count for row, count in work)
    query_lens = tuple(count for _, count in work)
    width = max(len(row.blocks) for row, _ in work)
    tables = [row.blocks + [0] * (width - len(row.blocks)) for row, _ in work]
    meta = StepMetadata(
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        num_decodes=sum(count == 1 and row.done > 0 for row, count in work),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        state_slots=torch.tensor([row.slot for row, _ in work]),
        has_state=torch.tensor([row.done > 0 for row, _ in work]),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    return meta, torch.tensor(ids)
