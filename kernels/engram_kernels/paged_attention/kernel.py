"""Attention of one mixed step over the paged cache: picks the kernel for its decodes and for its prefill chunks.

Three kernels share the work, each where it is fastest (H200 figures in docs/performance.md, made by
tests/bench/bench_kernels.py): `split_kv` for decodes and for short chunks on long histories, `hopper` for long chunks
with head size 128 on capability 9.0, `prefill` for everything else. All choices depend on host values of the step only:
nothing waits for the device, and the decode part captures into a CUDA graph that serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram_kernels.launch import LOG2E, capability, dependent_launch, multiprocessors, next_power_of_2
from engram_kernels.metadata import StepMetadata
from engram_kernels.paged_attention import hopper, prefill, split_kv
from engram_kernels.paged_attention.plan import Split, Tile, chunk_block, prefill_plan, split_plan

SHORT_CHUNK = 128
"""Chunks of at most this many tokens go to `split_kv`: the prefill kernels' blocks would be mostly empty."""
COMBINERS = 2048
"""About as many programs as run at once put pieces together; most of them have nothing to do in a large batch."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """Keys and values [T, K, D] of decodes that are not in the cache yet, and how they and the queries are normed and
    rotated (see `rope_attention`)."""

    k: Tensor
    v: Tensor
    cos_sin: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float


def paged_attention(q: Tensor, kv: Tensor, meta: StepMetadata, scale: float) -> Tensor:
    """Causal attention with grouped heads; as `engram_kernels.paged_attention.reference`.

    q [T, H, D] with contiguous heads (any token stride), kv [2, NB, K, 16, D] contiguous, D <= 256; returns [T, H, D].
    """
    tokens, heads, dim = q.shape
    if q.stride(2) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    decodes = meta.num_decodes
    if decodes:
        split(q, kv, out, meta, 0, decodes, decodes, 1, scale)
    query_lens = meta.query_lens_host[decodes:]
    if query_lens:
        if max(query_lens) <= SHORT_CHUNK:
            block = chunk_block(heads, kv.shape[2])
            split(q, kv, out, meta, decodes, len(query_lens), tokens - decodes, block, scale)
        elif capability(q)[0] == 9 and hopper.supports(q, kv):
            hopper.prefill_hopper(q, kv, out, meta, scale)
        else:
            tile = prefill_plan(tokens - decodes, heads, kv.shape[2], dim, q.dtype)
            run_prefill(tile, q, kv, out, meta, scale)
    return out


def split(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    meta: StepMetadata,
    first: int,
    count: int,
    tokens: int,
    block: int,
    scale: float,
    fresh: Fresh | None = None,
) -> None:
    """Sequences [first, first + count), which hold `tokens` new tokens, `block` tokens to a program."""
    heads, dim = q.shape[1:]
    choice = split_plan(count, block, heads, kv.shape[2], dim, q.dtype)
    run_split(choice, q, kv, out, meta, first, count, tokens, block, scale, fresh)


def run_split(
    choice: Split,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    meta: StepMetadata,
    first: int,
    count: int,
    tokens: int,
    block: int,
    scale: float,
    fresh: Fresh | None,
) -> None:
    """As `split`, with these parameters."""
    heads, dim = q.shape[1:]
    num_blocks, kv_heads = kv.shape[1], kv.shape[2]
    group = heads // kv_heads
    rows = max(16, next_power_of_2(block * group))
    # About this many programs: enough reads in flight on every multiprocessor, few enough that pieces stay long.
    target = max(1, choice.waves * multiprocessors(q) // kv_heads)
    blocks = count if block == 1 else tokens // block + count
    tasks = target + blocks
    part = torch.empty(tasks, kv_heads, block * group, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(tasks, kv_heads, block * group, dtype=torch.float32, device=q.device)
    padded, padded_dim = next_power_of_2(count), max(16, next_power_of_2(dim))
    pdl = dependent_launch(q)
    kwargs = {"launch_pdl": True} if pdl else {}
    tile = choice.keys
    new = fresh or Fresh(q, q, None, None, None, 0.0)
    split_kv.attend[(kv_heads, tasks)](
        q, kv, out, part, lse, meta.query_start, meta.seq_lens, meta.block_tables, new.k, new.v, meta.positions,
        meta.slots, q if new.cos_sin is None else new.cos_sin, q if new.q_weight is None else new.q_weight,
        q if new.k_weight is None else new.k_weight, num_blocks, meta.block_tables.stride(0),
        meta.block_tables.shape[1], first, count, target, q.stride(0), new.k.stride(0), scale * LOG2E, new.eps,
        kv_heads, group, dim, padded_dim, rows, padded, block, tile, max(tile, 32), choice.stages,
        fresh is not None, 0 if new.cos_sin is None else new.cos_sin.shape[1] // 2, new.q_weight is not None, pdl,
        num_warps=choice.warps, **kwargs,
    )  # fmt: skip
    # Decodes are the step's first tokens, chunks its last: the rows of these sequences are one range either way.
    token0 = 0 if first == 0 else q.shape[0] - tokens
    together = next_power_of_2(max(1, tokens * heads // COMBINERS))
    split_kv.combine[(tokens, -(-heads // together))](
        part, lse, out, meta.query_start, meta.seq_lens, first, count, token0, target,
        kv_heads, group, dim, padded_dim, padded, block, max(tile, 32), choice.merge, together, pdl,
        num_warps=4, **kwargs,
    )  # fmt: skip


def run_prefill(choice: Tile, q: Tensor, kv: Tensor, out: Tensor, meta: StepMetadata, scale: float) -> None:
    """The step's chunks, by the portable kernel."""
    heads, dim = q.shape[1:]
    first, chunks = meta.num_decodes, meta.num_sequences - meta.num_decodes
    num_blocks, kv_heads = kv.shape[1], kv.shape[2]
    padded_dim = max(16, next_power_of_2(dim))
    rows = choice.queries
    blocks = meta.chunk_blocks(rows)
    prefill.prefill[(heads // kv_heads, blocks, kv_heads)](
        q, kv, out, meta.query_start, meta.seq_lens, meta.block_tables,
        num_blocks, meta.block_tables.stride(0), meta.block_tables.shape[1], first, chunks, blocks,
        q.stride(0), scale * LOG2E, kv_heads, heads // kv_heads, dim, padded_dim, next_power_of_2(chunks),
        rows, choice.keys, choice.stages, choice.ahead, num_warps=choice.warps,
    )  # fmt: skip
