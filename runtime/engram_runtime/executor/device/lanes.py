"""What a transfer works with: the queues and buffers of one direction, and the pieces of packed keys and values."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram_runtime.executor.device.staging import Done


@dataclass(slots=True)
class Lane:
    """One direction: kernels and copies in two queues, two buffers between them; one caller at a time."""

    device: torch.device
    lock: threading.Lock = field(default_factory=threading.Lock)
    kernels: torch.cuda.Stream | None = None
    copies: torch.cuda.Stream | None = None
    buffers: list[Tensor] = field(default_factory=list)
    used: list[Done | None] = field(default_factory=lambda: [None, None])
    turn: int = 0

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self.kernels = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self.copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def buffer(self, nbytes: int, whole: int) -> Tensor:
        """The first bytes of the next staging buffer, which has `whole`; call it on the queue that writes there."""
        if not self.buffers:
            self.buffers = [torch.empty(whole, dtype=torch.uint8, device=self.device) for _ in range(2)]
            if self.kernels is not None:
                torch.cuda.current_stream().synchronize()
        self.turn ^= 1
        before = self.used[self.turn]
        if before is not None:
            before.hold_back()
        return self.buffers[self.turn][:nbytes]

    def release(self) -> None:
        """The buffer taken last may be written again once the current queue has come this far."""
        self.used[self.turn] = Done(self.device)

    def mark(self) -> Done:
        return Done(self.device)

    def wait(self) -> None:
        for stream in (self.kernels, self.copies):
            if stream is not None:
                stream.synchronize()


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece [L, 2, K, total, D] to be written: tokens [first, first + count) are its tokens from `skip` on."""

    whole: Tensor
    skip: int
    first: int
    count: int
    digest: Tensor

    @property
    def layer_rows(self) -> int:
        return self.whole.shape[1] * self.whole.shape[2]


def whole_piece(packed: Tensor) -> tuple[Tensor, int]:
    """(the contiguous piece that `packed` [L, 2, K, count, D] is a slice of along its tokens, tokens skipped)."""
    if packed.is_contiguous():
        return packed, 0
    layers, two, heads, count, dim = packed.shape
    total = packed.stride(2) // dim if heads > 1 or layers * two > 1 else count
    skip, rest = divmod(int(packed.storage_offset()), dim)
    shape = (layers, two, heads, total, dim)
    strides = (two * heads * total * dim, heads * total * dim, total * dim, dim, 1)
    size = layers * two * heads * total * dim * packed.element_size()
    same = packed.stride() == strides and packed.untyped_storage().nbytes() == size
    if rest or not same or skip + count > total:
        return packed.contiguous(), 0
    return packed.as_strided(shape, strides, 0), skip


def rows_of(piece: Tensor) -> int:
    """Rows that `_add` sees: of a KV piece [L, 2, K, count, D] its planes' heads, of a state its layers."""
    return piece.shape[0] * piece.shape[1] * piece.shape[2] if piece.dim() == 5 else piece.shape[0]
