"""Random steps for kernel tests: scattered blocks, unused cache poisoned, references in fp64.

Used by the Triton interpreter tier (CPU) and by the GPU tier, so it needs torch only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engram_kernels.metadata import PAGE, StepMetadata

Sequences = list[tuple[int, int]]
"""(new tokens, total length) of each sequence, decodes first."""
Limits = tuple[float, float]


def make_step(
    seqs: Sequences, *, device: str = "cpu", spare_blocks: int = 3, seed: int = 0
) -> tuple[StepMetadata, int]:
    """A step over randomly scattered blocks, and the number of blocks of the pool it lives in."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-total // PAGE) for _, total in seqs]
    pool = sum(needed) + spare_blocks
    order = torch.randperm(pool, generator=generator)
    tables = torch.zeros(len(seqs), max(needed) + 2, dtype=torch.int32)
    at = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[at : at + count].int()
        at += count
    positions = torch.cat([torch.arange(total - new, total) for new, total in seqs])
    owner = torch.cat([torch.full((new,), row) for row, (new, _) in enumerate(seqs)])
    slots = tables[owner, positions // PAGE].long() * PAGE + positions % PAGE
    starts = torch.tensor([0, *[new for new, _ in seqs]]).cumsum(0).int()
    decodes = 0
    while decodes < len(seqs) and seqs[decodes][0] == 1 and seqs[decodes][1] > 1:
        decodes += 1
    state_slots = torch.randperm(len(seqs) + 2, generator=generator)[: len(seqs)]
    meta = StepMetadata(
        positions=positions.to(device),
        slots=slots.to(device),
        query_start=starts.to(device),
        seq_lens=torch.tensor([total for _, total in seqs], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_decodes=decodes,
        max_query_len=max(new for new, _ in seqs),
        max_seq_len=max(total for _, total in seqs),
        state_slots=state_slots.to(device),
        has_state=torch.tensor([total > new for new, total in seqs], device=device),
        query_lens_host=tuple(new for new, _ in seqs),
        seq_lens_host=tuple(total for _, total in seqs),
    )
    return meta, pool


def with_bounds(meta: StepMetadata, spare: int) -> StepMetadata:
    """The step as a recorded one is: the host knows bounds only, and `spare` tokens belong to nobody."""
    chunks = meta.query_lens_host[meta.num_decodes :]
    total = sum(chunks) + spare
    return replace(
        meta,
        max_query_len=total,
        max_seq_len=1 << 16,
        query_lens_host=(1,) * meta.num_decodes + (total,) * len(chunks),
        seq_lens_host=(1 << 16,) * meta.num_sequences,
        chunk_tokens_host=total,
    )


def filled_cache(
    meta: StepMetadata, pool: int, heads: int, dim: int, dtype: torch.dtype, *, poison: float = float("nan")
) -> Tensor:
    """kv [2, pool, heads, PAGE, dim] with random values wherever a sequence has a token and `poison` elsewhere."""
    device = meta.block_tables.device
    kv = torch.full((2, pool, heads, PAGE, dim), poison, dtype=dtype, device=device)
    for table, length in zip(meta.block_tables, meta.seq_lens_host, strict=True):
        position = torch.arange(length, device=device)
        kv[:, table[position // PAGE].long(), :, position % PAGE] = torch.randn(
            length, 2, heads, dim, device=device
        ).to(dtype)
    return kv


def attention_fp64(q: Tensor, kv: Tensor, meta: StepMetadata, scale: float, tokens: Tensor | None = None) -> Tensor:
    """Attention of q [T, H, D] in fp64, sequence by sequence; only the rows in `tokens` (sorted) when given."""
    heads, kv_heads = q.shape[1], kv.shape[2]
    rows = torch.arange(q.shape[0], device=q.device) if tokens is None else tokens
    out = torch.empty(len(rows), heads, q.shape[2], dtype=torch.float64, device=q.device)
    start = 0
    for sequence, (new, length) in enumerate(zip(meta.query_lens_host, meta.seq_lens_host, strict=True)):
        mine = (rows >= start) & (rows < start + new)
        position = torch.arange(length, device=q.device)
        blocks = meta.block_tables[sequence][position // PAGE].long()
        keys, values = kv[:, blocks, :, position % PAGE].unbind(1)  # advanced indices in front: [length, 2, K, D]
        keys, values = (t.double().repeat_interleave(heads // kv_heads, dim=1) for t in (keys, values))
        picked = rows[mine]
        scores = torch.einsum("ihd,jhd->hij", q[picked].double(), keys) * scale
        visible = position[None, :] <= (length - new + picked - start)[:, None]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[mine] = torch.einsum("hij,jhd->ihd", weights, values)
        start += new
    return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in fp64; infinite when anything is NaN."""
    actual, expected = actual.double(), expected.double()
    error = ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Inside, torch.empty is filled with NaN (integers: their maximum): an element a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def exact_update(
    sequences: int, shape: tuple[int, int, int, int], *, device: str = "cpu"
) -> tuple[list[Tensor], Limits]:
    """Arguments x, dt, A, B, C, D, dt_bias and dt_limit of a state update in which only the last sum rounds.

    shape: heads, channels, groups, state size. Nothing is forgotten, and x, B and the step have so few bits that their
    product is exact: however a kernel multiplies and adds, the new state has the same fp32 bits as the reference's.
    """
    heads, channels, groups, size = shape
    x, b, c = (
        torch.randn(sequences, *inner, device=device).bfloat16().float()
        for inner in ((heads, channels), (groups, size), (groups, size))
    )
    dt = torch.randn(sequences, heads, device=device)
    forget = torch.zeros(heads, device=device)
    skip, bias = (torch.randn(heads, device=device) for _ in range(2))
    return [x / 64, dt, forget, b, c, skip, bias], (0.5, 0.5)
