"""The copies of a step around its forward pass: blocks, states, and sequences that leave for the host or come back.

All of them are queued like everything else. A swapped sequence lives in pinned memory, so that neither way waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram_kernels import Ops
from engram_runtime.executor.device.paging import block_copier
from engram_runtime.executor.device.staging import Packer, to_host
from engram_runtime.executor.plan import Copy, StepPlan, Swap
from engram_runtime.models.caches import Caches


@dataclass(frozen=True, slots=True)
class Copies:
    """(sources, destinations) of each kind in the step's packer; None for none."""

    blocks: tuple[slice, slice] | None
    loads: tuple[slice, slice] | None
    saves: tuple[slice, slice] | None


class Memory:
    """Moves KV and states between blocks, slots and the host, on the executor's stream."""

    def __init__(self, ops: Ops, caches: Caches, device: torch.device) -> None:
        self._ops, self._caches, self._device = ops, caches, device
        self._copy_blocks = block_copier(ops, caches.kv)
        self._swapped: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    def clear(self) -> None:
        self._swapped.clear()

    def pack(self, plan: StepPlan, packer: Packer) -> Copies:
        return Copies(
            _pairs(plan.block_copies, packer), _pairs(plan.state_loads, packer), _pairs(plan.state_saves, packer)
        )

    def move(self, plan: StepPlan, copies: Copies, packer: Packer) -> None:
        """Everything that comes before the forward pass."""
        for handle in plan.swap_drop:
            self._swapped.pop(handle, None)
        for swap in plan.swap_out:
            self._swap_out(swap)
        for swap in plan.swap_in:
            self._swap_in(swap)
        if copies.blocks is not None:
            self._copy_blocks(*map(packer.take, copies.blocks))
        self._copy_states(copies.loads, packer)

    def save(self, copies: Copies, packer: Packer) -> None:
        """Running states into checkpoint slots, after the forward pass."""
        self._copy_states(copies.saves, packer)

    def _copy_states(self, pairs: tuple[slice, slice] | None, packer: Packer) -> None:
        caches = self._caches
        if pairs is not None and caches.ssm is not None and caches.conv is not None:
            src, dst = map(packer.take, pairs)
            self._ops.copy_state(caches.ssm, caches.conv, src, dst)

    def _swap_out(self, swap: Swap) -> None:
        caches = self._caches
        ssm = conv = None
        if swap.state_slot is not None and caches.ssm is not None and caches.conv is not None:
            ssm, conv = to_host(caches.ssm[swap.state_slot]), to_host(caches.conv[swap.state_slot])
        packed = self._ops.gather_kv(caches.kv, swap.block_ids, 0, swap.tokens)
        self._swapped[swap.handle] = (to_host(packed), ssm, conv)

    def _swap_in(self, swap: Swap) -> None:
        caches = self._caches
        packed, ssm, conv = self._swapped.pop(swap.handle)
        self._ops.scatter_kv(packed, caches.kv, swap.block_ids, 0)
        if swap.state_slot is not None and caches.ssm is not None and caches.conv is not None:
            assert ssm is not None
            assert conv is not None
            caches.ssm[swap.state_slot].copy_(ssm, non_blocking=True)
            caches.conv[swap.state_slot].copy_(conv, non_blocking=True)


def _pairs(copies: Sequence[Copy], packer: Packer) -> tuple[slice, slice] | None:
    if not copies:
        return None
    return packer.add([copy.src for copy in copies]), packer.add([copy.dst for copy in copies])
