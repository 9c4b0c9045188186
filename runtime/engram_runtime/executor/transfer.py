"""Moves KV and states between the device caches and host tensors: for snapshots, restores and swaps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram_kernels import Ops
from engram_runtime.models.caches import Caches
from engram_runtime.models.spec import ModelSpec
from engram_runtime.snapshots.types import StateLayout, TensorSpec


def state_layout(spec: ModelSpec) -> StateLayout:
    """Canonical shapes of what a snapshot of this model holds."""
    states: dict[str, TensorSpec] = {}
    if spec.state is not None:
        layers = spec.state.num_layers
        states["ssm"] = TensorSpec((layers, *spec.state.ssm_shape), spec.state.ssm_dtype)
        states["conv"] = TensorSpec((layers, *spec.state.conv_shape), spec.state.conv_dtype)
    return StateLayout(spec.num_attention_layers, spec.num_kv_heads, spec.head_dim, spec.dtype, states)


class CacheTransfer:
    """`KVTransfer` over the executor's caches.

    Safe beside a running step because nobody else touches what it touches: blocks and slots it reads are under a
    lease and finished, those it writes are not yet known to anybody.
    """

    def __init__(self, ops: Ops, caches: Caches) -> None:
        self._ops = ops
        self._caches = caches

    @torch.inference_mode()
    def read_kv(self, block_ids: Sequence[int], first: int, count: int) -> Tensor:
        """Tokens [first, first + count) of the sequence with this block table -> host [L, 2, K, count, D]."""
        return self._ops.gather_kv(self._caches.kv, block_ids, first, count).cpu()

    @torch.inference_mode()
    def write_kv(self, block_ids: Sequence[int], first: int, packed: Tensor) -> None:
        """packed [L, 2, K, count, D] becomes tokens [first, first + count)."""
        self._ops.scatter_kv(packed, self._caches.kv, block_ids, first)

    @torch.inference_mode()
    def read_state(self, slot: int) -> dict[str, Tensor]:
        """Host copies {"ssm": [layers, H, P, N], "conv": [layers, C, W - 1]}; {} without state."""
        caches = self._caches
        if caches.ssm is None or caches.conv is None:
            return {}
        return {"ssm": caches.ssm[slot].clone().cpu(), "conv": caches.conv[slot].clone().cpu()}

    @torch.inference_mode()
    def write_state(self, slot: int, tensors: dict[str, Tensor]) -> None:
        """The inverse of `read_state`; ValueError when a tensor is missing or has another shape or dtype."""
        for cache, value in self._checked_state(tensors):
            cache[slot].copy_(value)

    def write(
        self,
        block_ids: Sequence[int],
        kv: Sequence[tuple[int, Tensor]],
        state_slot: int | None,
        state: dict[str, Tensor],
    ) -> int:
        """As `KVTransfer.write`; here all of it is there at once."""
        if state_slot is not None:
            self.write_state(state_slot, state)
        for first, packed in kv:
            self.write_kv(block_ids, first, packed)
        return 0

    def settle(self) -> None:
        """Until what this thread wrote is there: here it is there at once."""

    def _checked_state(self, tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(cache [slots, ...], value) of each state tensor; [] without state."""
        caches, found = self._caches, list[tuple[Tensor, Tensor]]()
        if caches.ssm is None or caches.conv is None:
            return found
        for name, cache in (("ssm", caches.ssm), ("conv", caches.conv)):
            value = tensors.get(name)
            if value is None or value.shape != cache.shape[1:]:
                shape = "missing" if value is None else tuple(value.shape)
                raise ValueError(f"{name} must have shape {tuple(cache.shape[1:])}, got {shape}")
            if value.dtype != cache.dtype:  # copying would convert it, and nobody would know
                raise ValueError(f"{name} must be {cache.dtype}, got {value.dtype}")
            found.append((cache, value))
        return found
