"""The kernels around a decode step, each in one launch: what it changes in the row tables, its plan from the host, its
inputs, and its tokens to the host.

None of those before the model may let its successor start early (no dependent launch): every later kernel may read what
they write, the step's metadata, before it waits for its own predecessor.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram_kernels.metadata import PAGE as PAGE_TOKENS
from engram_runtime.executor.device.ring import SLOTS as RING_SLOTS
from engram_runtime.executor.device.tables import OPEN_WORDS, RowTables

BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def _gather(
    plan, last, ints, floats, tables, ids, slots, seq_lens, sampled_at, has_state, block_tables, out_ints, out_floats,
    rows, batch: tl.constexpr, stride: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (sequence, part): BLOCK columns of its block table; the first part also does everything else."""
    i = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(plan + i)
    position = tl.load(plan + batch + i)
    column = tl.load(plan + 3 * batch + i)
    block = tl.load(plan + 4 * batch + i).to(tl.int32)
    table = tables + row * stride
    here = position // PAGE
    c = part * BLOCK + tl.arange(0, BLOCK)
    # The new block comes from the plan, not from the table: another program may not have written it yet.
    pages = tl.load(table + c, mask=c <= here, other=0)
    tl.store(block_tables + i.to(tl.int64) * stride + c, tl.where(c == column, block, pages), mask=c <= here)
    if part == 0:
        page = tl.load(table + here)
        page = tl.where(here == column, block, page)
        tl.store(table + column, block)
        tl.store(ids + i, tl.where(row < rows, tl.load(last + row), 0))
        tl.store(slots + i, page.to(tl.int64) * PAGE + position % PAGE)
        tl.store(seq_lens + i, (position + 1).to(tl.int32))
        tl.store(sampled_at + i, position + 1)
        tl.store(has_state + i, (position > 0).to(tl.uint8))
        for line in tl.static_range(2):
            tl.store(out_ints + line * batch + i, tl.load(ints + line * (rows + 1) + row))
        for line in tl.static_range(3):
            tl.store(out_floats + line * batch + i, tl.load(floats + line * (rows + 1) + row))


def gather(plan: Tensor, last: Tensor, ints: Tensor, floats: Tensor, blocks: Tensor) -> tuple[Tensor, ...]:
    """As `inputs.gather_reference`; block tables are filled up to each sequence's last block only."""
    batch, stride = plan.shape[1], blocks.shape[1]
    device = plan.device
    outputs = (
        torch.empty(batch, dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.uint8, device=device),
        torch.empty(batch, stride, dtype=torch.int32, device=device),
        torch.empty(2, batch, dtype=torch.int64, device=device),
        torch.empty(3, batch, dtype=torch.float32, device=device),
    )
    _gather[(batch, -(-stride // BLOCK))](
        plan, last, ints, floats, blocks, *outputs, last.shape[0] - 1, batch, stride, PAGE_TOKENS, BLOCK, num_warps=4
    )
    return outputs


@triton.jit(do_not_specialize=["rows", "stride", "opened", "count"])
def _change(
    opens, updates, last, ints, floats, tables, rows, stride, opened, count, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program i: row i of those that are opened, or BLOCK of the updates of block tables."""
    i = tl.program_id(0)
    if i < opened:
        words = opens + i * WORDS
        row = tl.load(words)
        tl.store(last + row, tl.load(words + 1))
        for line in tl.static_range(2):
            tl.store(ints + line * rows + row, tl.load(words + 2 + line))
        for line in tl.static_range(WORDS - 4):
            value = tl.load(words + 4 + line).to(tl.float64, bitcast=True)
            tl.store(floats + line * rows + row, value.to(tl.float32))
    else:
        j = (i - opened) * BLOCK + tl.arange(0, BLOCK)
        live = j < count
        owners = tl.load(updates + j, mask=live, other=0)
        columns = tl.load(updates + count + j, mask=live, other=0)
        blocks = tl.load(updates + 2 * count + j, mask=live, other=0)
        tl.store(tables + owners * stride + columns, blocks.to(tl.int32), mask=live)


def change(tables: RowTables, opens: Tensor, updates: Tensor) -> None:
    """As `tables.change_reference`."""
    opened, count = opens.numel() // OPEN_WORDS, updates.numel() // 3
    _change[(opened + -(-count // BLOCK),)](
        opens, updates, tables.last, tables.ints, tables.floats, tables.blocks, tables.ints.shape[1],
        tables.blocks.stride(0), opened, count, OPEN_WORDS, BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["gate", "most"])
def _hold(reached, ticket, gate, most):
    """One program that asks again and again: a word in the L2 cache, read by one warp."""
    wanted = tl.load(ticket)
    here = tl.atomic_add(reached + gate, 0, sem="acquire")
    asked = 1
    while (here < wanted) & (asked < most):
        here = tl.atomic_add(reached + gate, 0, sem="acquire")
        asked += 1
    if here < wanted:
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


MOST_ASKED = 1 << 26
"""Half a minute, where a copy of LEAD_BYTES is over in some milliseconds. What has not come by then never will, and an
error of the device ends the engine where waiting on would hang it."""


def hold(reached: Tensor, gate: int, ticket: Tensor, most: int = MOST_ASKED) -> None:
    """As `arrivals.hold_reference`, and waits; after asking `most` times it stops everything with an error."""
    _hold[(1,)](reached, ticket, gate, most, num_warps=1)


@triton.jit(do_not_specialize=["count"])
def _bring(source, target, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)


def bring(source: Tensor, target: Tensor) -> None:
    """source [n] int64 in pinned host memory to target [n] on the device."""
    count = source.numel()
    _bring[(-(-count // BLOCK),)](source, target, count, BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["words", "count"])
def _fetch(plans, tick, plan, words, count, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program i: BLOCK words of the plan, in whole lines: each read of host memory takes the link a microsecond."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(tick) % SLOTS
    tl.store(plan + i, tl.load(plans + slot * words + i, mask=i < count, other=0), mask=i < count)


def fetch(plans: Tensor, tick: Tensor, plan: Tensor) -> None:
    """As `ring.fetch_reference`; plans in pinned host memory."""
    count = plan.numel()
    _fetch[(-(-count // BLOCK),)](plans, tick, plan, plans.shape[1], count, RING_SLOTS, BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["rows", "count"])
def _publish(
    tokens, logprobs, host_tokens, host_logprobs, last, feed, tick, rows, count,
    CHOSEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, so that nobody reads the count when it changes."""
    now = tl.load(tick)
    if CHOSEN:
        at = now % SLOTS * rows
        for first in range(0, count, BLOCK):
            i = first + tl.arange(0, BLOCK)
            token = tl.load(tokens + i, mask=i < count, other=0)
            tl.store(host_tokens + at + i, token, mask=i < count)
            tl.store(host_logprobs + at + i, tl.load(logprobs + i, mask=i < count, other=0.0), mask=i < count)
            tl.store(last + tl.load(feed + i, mask=i < count, other=0), token, mask=i < count)
    tl.debug_barrier()
    tl.store(tick, now + 1)


def publish(
    chosen: tuple[Tensor, Tensor] | None, found: tuple[Tensor, Tensor], last: Tensor, feed: Tensor, tick: Tensor
) -> None:
    """As `ring.publish_reference`; found in pinned host memory."""
    tokens, logprobs = found if chosen is None else chosen
    count = feed.numel()
    _publish[(1,)](
        tokens, logprobs, *found, last, feed, tick, found[0].shape[1], count,
        chosen is not None, RING_SLOTS, 256, num_warps=4,
    )  # fmt: skip
