"""Plain numbers to the device in one copy, and results back without waiting.

A step's plan is a few kilobytes in a dozen arrays. Copied one by one they cost more than a small model's forward pass,
so a `Packer` lays them side by side in pinned memory and one asynchronous copy takes them over. Pinned buffers come
from torch's caching host allocator, which does not hand a buffer out again before the copies that use it are done.
On a CPU the same code runs without pinning and without events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

FILLER = np.zeros(1, dtype=np.int64)
"""So that every array begins at a multiple of 16 bytes: Triton compiles a kernel again for one that does not."""


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised host memory that copies to and from `device` need not wait for."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def to_host(value: Tensor) -> Tensor:
    """A host copy that is complete once the work queued so far is (see `Done`)."""
    host = host_buffer(value.shape, value.dtype, value.device)
    host.copy_(value, non_blocking=True)
    return host


class Done:
    """Marks a place in the device's queue of work; on the CPU everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Block the calling thread until the device has come this far."""
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self) -> None:
        """Let the current stream's later work begin only when the device has come this far; the caller goes on."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


Bring = Callable[[Tensor, Tensor], None]
"""source [n] int64 in pinned host memory, target [n] on the device: queue a copy by a kernel."""


class Packer:
    """Collects int64 arrays; `flush` moves all of them, then `take` gives each one's view on the device.

    bring: a kernel that moves them instead of the copy engine, which large copies of other streams may keep busy: a
    step's plan of 100 KB waited for all of a restore that was on its way. `host` is then to be kept until it has run.
    """

    def __init__(self, device: torch.device, bring: Bring | None = None) -> None:
        self._device, self._bring = device, bring
        self.host: Tensor | None = None
        self._parts: list[np.ndarray] = []
        self._size = 0
        self._moved: Tensor | None = None

    def __len__(self) -> int:
        return self._size

    def add(self, values: Sequence[int] | np.ndarray) -> slice:
        """Queue values; floats travel as the bits of their float64 (see `float_bits`)."""
        part = np.asarray(values, dtype=np.int64)
        where = slice(self._size, self._size + part.size)
        self._parts.append(part.reshape(-1))
        if part.size % 2:
            self._parts.append(FILLER)
        self._size += part.size + part.size % 2
        return where

    def flush(self, into: Tensor | None = None) -> None:
        """One copy of everything to new device memory, or to the beginning of `into` [>= len] int64."""
        host = host_buffer((self._size,), torch.int64, self._device)
        if self._parts:
            np.concatenate(self._parts, out=host.numpy())
        target = torch.empty(self._size, dtype=torch.int64, device=self._device) if into is None else into[: self._size]
        if self._bring is None or not self._size:
            target.copy_(host, non_blocking=True)
        else:
            self._bring(host, target)
            self.host = host
        self._moved = target

    def take(self, where: slice) -> Tensor:
        """[n] int64 on the device."""
        if self._moved is None:
            raise RuntimeError("a packer is read before its copy was started")
        return self._moved[where]


def float_bits(values: Sequence[float]) -> list[int]:
    """Floats as int64 words that `Tensor.view(torch.float64)` turns back."""
    bits: list[int] = np.asarray(values, dtype=np.float64).view(np.int64).tolist()
    return bits
