"""The attention of a model as problems for the search: decodes, short chunks on a history, and chunks of any length.

Each key serves every length of context, so each problem is several lengths, which count alike. Among many sequences of
one length another may be much longer, which must not end long after the others: that is a case of its own. Decodes are
tuned in the form of a decode step, where the kernel norms, rotates and appends as well.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram_kernels.autotune.driver import Card
from engram_kernels.autotune.linear import COLD_BYTES
from engram_kernels.autotune.search import Case, Problem
from engram_kernels.launch import next_power_of_2
from engram_kernels.metadata import PAGE, StepMetadata
from engram_kernels.paged_attention import plan
from engram_kernels.paged_attention.kernel import Fresh, run_prefill, run_split
from engram_kernels.paged_attention.plan import Split, Tile
from engram_kernels.paged_attention.reference import paged_attention as reference
from engram_kernels.rope_append.reference import rope_append

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
"""Against fp32, of queries and keys that are rounded to the dtype."""
CASE_BYTES = 4 << 30
"""Keys and values of a case; contexts that need more are left out. A sixteenth of it in each process that compiles."""
SHARED_MEMORY = 227 << 10
REGISTERS = 160
"""Scores and sums in fp32 that a thread may hold."""
MOST_SETS = 64
COMPANY, LONGER = 8, 16
"""From so many decodes on, one that is so many times as long as the others is among the cases."""
CONTEXTS = (512, 2048, 8192)
CHUNKS = ((8, 500), (40, 2500), (120, 8000))
"""New tokens, length."""
DECODE_TILES = [
    *((64, 2, 4), (64, 3, 4), (64, 2, 2), (64, 3, 2), (32, 3, 4), (32, 2, 1), (32, 3, 1), (16, 3, 1)),
    *((128, 2, 4), (128, 2, 8)),
]
CHUNK_TILES = [(64, 3, 4), (64, 2, 4), (32, 3, 4), (128, 2, 8), (64, 2, 8), (128, 2, 4)]
"""Keys, stages, warps."""
WINDOW = 64
"""Rows at the start, in the middle and at the end of a long chunk that are compared."""

Sequences = list[tuple[int, int]]
"""New tokens and length of each sequence."""


@dataclass(frozen=True, slots=True)
class Heads:
    """H, K and D of the layers; what a decode step does beside the attention: rotation of so many dimensions (0: none)
    and norms of single heads."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    rotated: int = 0
    normed: bool = False

    def fits(self, rows: int, keys: int, stages: int, warps: int) -> bool:
        """Whether tiles of keys and values fit the shared memory, and so many rows' scores and sums the registers."""
        wide = max(16, next_power_of_2(self.dim))
        held = rows * (wide + keys) // (32 * warps)
        return (2 * stages * keys + rows) * wide * 2 <= SHARED_MEMORY and held <= REGISTERS


@dataclass(frozen=True, slots=True)
class Operands:
    device: torch.device
    cold: bool

    def cache(self, heads: Heads, seqs: Sequences) -> tuple[Tensor, list[StepMetadata]]:
        """kv for one case alone, and steps over disjoint blocks of it: as many as leave no keys in a cache."""
        needed = sum(-(-length // PAGE) for _, length in seqs)
        block = 2 * heads.kv_heads * PAGE * heads.dim * 2
        sets = max(1, min(MOST_SETS, -(-COLD_BYTES // (needed * block)))) if self.cold else 1
        shape = (2, sets * needed, heads.kv_heads, PAGE, heads.dim)
        return torch.randn(shape, device=self.device, dtype=heads.dtype), steps(seqs, sets, self.device)


def steps(seqs: Sequences, sets: int, device: torch.device) -> list[StepMetadata]:
    """Steps of the same sequences (all decodes or all chunks), each over scattered blocks of its own."""
    counts = [-(-length // PAGE) for _, length in seqs]
    base = torch.zeros(len(seqs), max(counts), dtype=torch.int64)
    for row, (first, count) in enumerate(zip(itertools.accumulate(counts, initial=0), counts, strict=False)):
        base[row, :count] = torch.arange(first, first + count)
    positions = torch.cat([torch.arange(length - new, length) for new, length in seqs])
    owner = torch.cat([torch.full((new,), row) for row, (new, _) in enumerate(seqs)])
    query_lens, seq_lens = tuple(new for new, _ in seqs), tuple(length for _, length in seqs)
    order = torch.randperm(sets * sum(counts))
    found = []
    for i in range(sets):
        tables = order[i * sum(counts) + base]
        found.append(
            StepMetadata(
                positions=positions.to(device),
                slots=(tables[owner, positions // PAGE] * PAGE + positions % PAGE).to(device),
                query_start=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device),
                seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
                block_tables=tables.int().to(device),
                num_decodes=len(seqs) if max(query_lens) == 1 else 0,
                max_query_len=max(query_lens),
                max_seq_len=max(seq_lens),
                state_slots=torch.zeros(len(seqs), dtype=torch.int64, device=device),
                has_state=torch.ones(len(seqs), dtype=torch.bool, device=device),
                query_lens_host=query_lens,
                seq_lens_host=seq_lens,
            )
        )
    return found


def affordable(heads: Heads, lists: Sequence[Sequences], operands: Operands) -> list[Sequences]:
    """Those whose keys and values are not too much; the first in any case."""
    each = 4 * heads.kv_heads * heads.dim
    most = CASE_BYTES if operands.cold else CASE_BYTES // 16
    return [
        seqs
        for i, seqs in enumerate(lists)
        if i == 0 or sum(-(-length // PAGE) * PAGE for _, length in seqs) * each <= most
    ]


def uneven(count: int, length: int) -> list[int]:
    """Lengths a little below `length`, few of which end with a page."""
    return [max(2, length - 5 - i * 37 % 61) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Decodes:
    """sizes: sequences."""

    heads: Heads
    sizes: tuple[int, ...]
    contexts: tuple[int, ...] = CONTEXTS

    @property
    def op(self) -> str:
        return plan.SPLIT

    def key(self, size: int) -> str:
        return _split_key(self.heads, size, 1)

    def candidates(self, size: int, card: Card) -> list[Split]:
        merges = (16, 64) if size <= 4 else (16,)  # elsewhere there are few pieces to put together
        rows = max(16, next_power_of_2(self.heads.heads // self.heads.kv_heads))
        return _splits(self.heads, size, 1, rows, DECODE_TILES, (1, 2, 4, 8), merges)

    def pointless(self, card: Card) -> str | None:
        return None

    def operands(self, device: torch.device, cold: bool) -> Operands:
        return Operands(device, cold)

    def problem(self, size: int, operands: Operands, card: Card) -> Problem[Split]:
        lists = [[(1, length) for length in uneven(size, context)] for context in self.contexts]
        if size >= COMPANY:
            (_, first), *others = lists[0]
            lists.append([(1, first * LONGER), *others])
        cases = [self._case(size, seqs, operands) for seqs in affordable(self.heads, lists, operands)]
        return _problem(self, size, cases, card)

    def _case(self, size: int, seqs: Sequences, operands: Operands) -> Case[Split]:
        h = self.heads
        kv, metas = operands.cache(h, seqs)
        device = operands.device
        sizes = [h.heads * h.dim, h.kv_heads * h.dim, h.kv_heads * h.dim]
        wide = torch.randn(size, sum(sizes), device=device, dtype=h.dtype)
        q, k, v = (part.view(size, -1, h.dim) for part in torch.split(wide, sizes, dim=-1))
        cos_sin = None
        if h.rotated:
            angle = torch.randn(max(metas[0].seq_lens_host), h.rotated // 2, device=device)
            cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)
        norms = [torch.randn(h.dim, device=device, dtype=h.dtype) for _ in range(2)] if h.normed else [None, None]
        fresh = Fresh(k, v, cos_sin, norms[0], norms[1], 1e-6)
        slots = metas[0].slots

        def run(choice: Split, i: int) -> Tensor:
            out = torch.empty(size, h.heads, h.dim, dtype=h.dtype, device=device)
            run_split(choice, q, kv, out, metas[i], 0, size, size, 1, h.dim**-0.5, fresh)
            return out

        def expected() -> Tensor:
            weights = [None if weight is None else weight.float() for weight in norms]
            turned = rope_append(
                q.float(), k.float(), v.float(), metas[0].positions, cos_sin, kv, slots, weights[0], weights[1]
            )
            return reference(turned.to(h.dtype).float(), kv, metas[0], h.dim**-0.5)

        def forget() -> None:
            kv[:, slots // PAGE, :, slots % PAGE] = torch.nan  # the step itself has to append them

        return Case(f"{size}x{seqs[0][1]}", run, expected, len(metas), prepare=forget)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Of at most 128 tokens, on a history. sizes: sequences."""

    heads: Heads
    sizes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = CHUNKS

    @property
    def op(self) -> str:
        return plan.SPLIT

    @property
    def block(self) -> int:
        return plan.chunk_block(self.heads.heads, self.heads.kv_heads)

    def key(self, size: int) -> str:
        return _split_key(self.heads, size, self.block)

    def candidates(self, size: int, card: Card) -> list[Split]:
        rows = max(16, next_power_of_2(self.block * self.heads.heads // self.heads.kv_heads))
        return _splits(self.heads, size, self.block, rows, CHUNK_TILES, (1, 2, 4), (16,))

    def pointless(self, card: Card) -> str | None:
        return None

    def operands(self, device: torch.device, cold: bool) -> Operands:
        return Operands(device, cold)

    def problem(self, size: int, operands: Operands, card: Card) -> Problem[Split]:
        lists = [[(new, length) for length in uneven(size, longest)] for new, longest in self.chunks]
        cases = [self._case(seqs, operands) for seqs in affordable(self.heads, lists, operands)]
        return _problem(self, size, cases, card)

    def _case(self, seqs: Sequences, operands: Operands) -> Case[Split]:
        q, kv, metas = _queries(self.heads, seqs, operands)
        block, scale = self.block, self.heads.dim**-0.5

        def run(choice: Split, i: int) -> Tensor:
            out = torch.empty_like(q)
            run_split(choice, q, kv, out, metas[i], 0, len(seqs), q.shape[0], block, scale, None)
            return out

        name = f"{len(seqs)}x{seqs[0][0]}@{seqs[0][1]}"
        return Case(name, run, lambda: reference(q.float(), kv, metas[0], scale), len(metas))


@dataclass(frozen=True, slots=True)
class Prefill:
    """Long chunks by the portable kernel, alone and on a history of twice their length. sizes: new tokens."""

    heads: Heads
    sizes: tuple[int, ...]

    @property
    def op(self) -> str:
        return plan.PREFILL

    def key(self, size: int) -> str:
        h = self.heads
        return plan.prefill_key(size, h.heads, h.kv_heads, h.dim, h.dtype)

    def candidates(self, size: int, card: Card) -> list[Tile]:
        h = self.heads
        found = [plan.prefill_plan(size, h.heads, h.kv_heads, h.dim, h.dtype)]
        for queries, keys, stages, warps in itertools.product((64, 128), (32, 64, 128), (2, 3), (4, 8)):
            if h.fits(queries, keys, stages, warps):
                found.append(Tile(queries, keys, stages, warps, ahead=False))
        return list(dict.fromkeys(found))

    def pointless(self, card: Card) -> str | None:
        if not (card.hopper and self.heads.dim == 128):
            return None
        return "chunks of more than 128 tokens with heads of 128 have a kernel of their own on Hopper"

    def operands(self, device: torch.device, cold: bool) -> Operands:
        return Operands(device, cold)

    def problem(self, size: int, operands: Operands, card: Card) -> Problem[Tile]:
        lists = [[(size, size)], [(size, 3 * size)]]
        cases = [self._case(seqs, operands) for seqs in affordable(self.heads, lists, operands)]
        return _problem(self, size, cases, card)

    def _case(self, seqs: Sequences, operands: Operands) -> Case[Tile]:
        q, kv, metas = _queries(self.heads, seqs, operands)
        (new, length) = seqs[0]
        scale = self.heads.dim**-0.5
        starts = sorted({0, max(0, new // 2 - 7), max(0, new - WINDOW)})

        def run(choice: Tile, i: int) -> Tensor:
            out = torch.empty_like(q)
            run_prefill(choice, q, kv, out, metas[i], scale)
            return out

        def expected() -> Tensor:
            parts = []
            for start in starts:
                count = min(WINDOW, new - start)
                meta = dataclasses.replace(
                    metas[0], query_lens_host=(count,), seq_lens_host=(length - new + start + count,)
                )
                parts.append(reference(q[start : start + count].float(), kv, meta, scale))
            return torch.cat(parts)

        rows = torch.cat([torch.arange(start, min(start + WINDOW, new)) for start in starts]).to(operands.device)
        return Case(f"{new}@{length}", run, expected, min(2, len(metas)), rows=rows)


def _queries(heads: Heads, seqs: Sequences, operands: Operands) -> tuple[Tensor, Tensor, list[StepMetadata]]:
    """Rotated queries of chunks, a cache that holds their keys, steps."""
    kv, metas = operands.cache(heads, seqs)
    tokens = sum(new for new, _ in seqs)
    q = torch.randn(tokens, heads.heads, heads.dim, device=operands.device, dtype=heads.dtype)
    return q, kv, metas


def _split_key(heads: Heads, sequences: int, block: int) -> str:
    return plan.split_key(sequences, block, heads.heads, heads.kv_heads, heads.dim, heads.dtype)


def _splits(
    heads: Heads,
    sequences: int,
    block: int,
    rows: int,
    tiles: Sequence[tuple[int, int, int]],
    waves: Sequence[int],
    merges: Sequence[int],
) -> list[Split]:
    """Today's choice first."""
    found = [plan.split_plan(sequences, block, heads.heads, heads.kv_heads, heads.dim, heads.dtype)]
    for (keys, stages, warps), wave, merge in itertools.product(tiles, waves, merges):
        if heads.fits(rows, keys, stages, warps):
            found.append(Split(keys, stages, warps, wave, merge))
    return list(dict.fromkeys(found))


def _problem(subject: Decodes | Chunks | Prefill, size: int, cases: Sequence[Case[Any]], card: Card) -> Problem[Any]:
    candidates: Sequence[Any] = subject.candidates(size, card)
    describe: Callable[[Any], dict[str, Any]] = lambda choice: {  # noqa: E731
        name: int(value) for name, value in dataclasses.asdict(choice or candidates[0]).items()
    }
    tolerance = TOLERANCE[subject.heads.dtype]
    return Problem(subject.op, subject.key(size), candidates, cases, tolerance, describe)
