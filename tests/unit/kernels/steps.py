"""Builds mixed steps and replays whole sequences chunk by chunk, for tests of ops."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from engram_kernels.metadata import PAGE, StepMetadata


def make_step(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_tables: Sequence[Sequence[int]] | None = None,
    state_slots: Sequence[int] | None = None,
    seed: int = 0,
) -> StepMetadata:
    """A step whose sequences get shuffled, disjoint blocks (never block 0) unless tables are given."""
    needed = [-(-length // PAGE) for length in seq_lens]
    if block_tables is None:
        free = list(range(1, sum(needed) + 1))
        random.Random(seed).shuffle(free)
        block_tables = [[free.pop() for _ in range(count)] for count in needed]
    width = max((len(table) for table in block_tables), default=0)
    tables = torch.zeros(len(seq_lens), width, dtype=torch.int32)
    for row, table in enumerate(block_tables):
        tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    positions = [p for n, length in zip(query_lens, seq_lens, strict=True) for p in range(length - n, length)]
    slots = [
        block_tables[row][p // PAGE] * PAGE + p % PAGE
        for row, (n, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for p in range(length - n, length)
    ]
    has_state = [length > n for n, length in zip(query_lens, seq_lens, strict=True)]
    num_decodes = 0
    while num_decodes < len(query_lens) and query_lens[num_decodes] == 1 and has_state[num_decodes]:
        num_decodes += 1
    return StepMetadata(
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        query_start=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        num_decodes=num_decodes,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        state_slots=torch.tensor(state_slots if state_slots is not None else [0] * len(seq_lens), dtype=torch.int64),
        has_state=torch.tensor(has_state, dtype=torch.bool),
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(seq_lens),
    )


def replay(
    lengths: Sequence[int], rng: random.Random, *, max_chunk: int = 40, state_slots: Sequence[int] | None = None
) -> Iterator[tuple[StepMetadata, list[tuple[int, int]]]]:
    """Steps that together cover every token of every sequence, in random chunks and random company.

    Yields the metadata and, for each new token in order, (sequence, position). Decodes come first, as in any step.
    """
    block_tables = make_step(lengths, lengths, seed=rng.randrange(1 << 30)).block_tables.tolist()
    done = [0] * len(lengths)
    while any(a < b for a, b in zip(done, lengths, strict=True)):
        chosen = [s for s in range(len(lengths)) if done[s] < lengths[s] and rng.random() < 0.7]
        if not chosen:
            continue
        chunks = {s: min(rng.choice([1, 1, rng.randint(1, max_chunk)]), lengths[s] - done[s]) for s in chosen}
        rng.shuffle(chosen)
        chosen.sort(key=lambda s: not (chunks[s] == 1 and done[s] > 0))
        meta = make_step(
            [chunks[s] for s in chosen],
            [done[s] + chunks[s] for s in chosen],
            block_tables=[block_tables[s] for s in chosen],
            state_slots=None if state_slots is None else [state_slots[s] for s in chosen],
        )
        tokens = [(s, p) for s in chosen for p in range(done[s], done[s] + chunks[s])]
        for s in chosen:
            done[s] += chunks[s]
        yield meta, tokens


def relative_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root-mean-square error relative to the reference's root mean square; inf when anything is not finite."""
    if got.shape != expected.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    error = (got.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt().clamp_min(1e-30))
