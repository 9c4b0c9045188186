"""KV and states between a GPU's caches and the host, beside running steps.

Worker threads read and write on a stream of their own. What they read is finished and under a lease. What they write
to was given back by somebody, whose last step may still be queued when that sequence turned out to have ended: so a
write begins after everything that is submitted, and returns when it is done, before anybody is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engram_kernels import Ops
from engram_runtime.executor.device.staging import Done
from engram_runtime.executor.transfer import CacheTransfer
from engram_runtime.models.caches import Caches


class DeviceTransfer(CacheTransfer):
    """`submitted` gives the mark behind the newest step, None before the first."""

    def __init__(self, ops: Ops, caches: Caches, device: torch.device, submitted: Callable[[], Done | None]) -> None:
        super().__init__(ops, caches)
        self._submitted = submitted
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            newest = self._submitted()
            if newest is not None:
                newest.hold_back()
            yield
            self._stream.synchronize()

    def read_kv(self, block_ids: Sequence[int], first: int, count: int) -> Tensor:
        with self._beside():
            return super().read_kv(block_ids, first, count)

    def write_kv(self, block_ids: Sequence[int], first: int, packed: Tensor) -> None:
        with self._beside():
            super().write_kv(block_ids, first, packed)

    def read_state(self, slot: int) -> dict[str, Tensor]:
        with self._beside():
            return super().read_state(slot)

    def write_state(self, slot: int, tensors: dict[str, Tensor]) -> None:
        with self._beside():
            super().write_state(slot, tensors)
