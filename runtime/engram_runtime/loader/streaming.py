"""Weights from files to the device: several threads read pieces into pinned memory and hand them to the copy engine.

Copies from mapped files run at a fifth of the link, one page fault after the other. Here a thread reads its next piece
while the device takes the one before, so a file in the page cache arrives at the link's rate and any other at the
disk's. Reads go through the page cache on purpose: the next start on this machine finds the weights there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engram_runtime.errors import CheckpointError
from engram_runtime.loader.header import TensorInfo

PIECE_BYTES = 16 << 20
THREADS = 8
DISK_READERS = 2
"""Threads that read what no page cache has: a disk gives less to eight of them than to one."""


@dataclass(frozen=True, slots=True)
class _Piece:
    file: Path
    offset: int
    target: Tensor
    """uint8 view of what the piece fills."""


def pieces(weights: Sequence[tuple[TensorInfo, Tensor]]) -> Iterator[_Piece]:
    """In the order of the files, so that a disk reads on."""
    for info, tensor in sorted(weights, key=lambda pair: (str(pair[0].file), pair[0].offset)):
        flat = tensor.detach().view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), PIECE_BYTES):
            yield _Piece(info.file, info.offset + start, flat[start : start + PIECE_BYTES])


def stream_weights(weights: Sequence[tuple[TensorInfo, Tensor]], done: Callable[[int], None]) -> None:
    """Fill contiguous tensors of the stored dtype; `done` is told the bytes of each piece. CheckpointError as a file
    cannot be read."""
    work, lock, disk = pieces(weights), threading.Lock(), threading.Semaphore(DISK_READERS)

    def take() -> _Piece | None:
        with lock:
            return next(work, None)

    if weights:
        device = weights[0][1].device
        with ThreadPoolExecutor(THREADS, thread_name_prefix="engram-weights") as pool:
            workers = [pool.submit(_Worker(device, disk).run, take, done) for _ in range(THREADS)]
        for worker in workers:
            worker.result()


class _Worker:
    """Two buffers: one is read into while the other is copied."""

    def __init__(self, device: torch.device, disk: threading.Semaphore) -> None:
        self._device, self._disk = device, disk
        self._files: dict[Path, int] = {}

    @torch.inference_mode(False)
    def run(self, take: Callable[[], _Piece | None], done: Callable[[int], None]) -> None:
        cuda = self._device.type == "cuda"
        buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        copied: list[torch.cuda.Event | None] = [None, None]
        turn = 0
        try:
            while (piece := take()) is not None:
                before = copied[turn]
                if before is not None:
                    before.synchronize()
                buffer = buffers[turn][: piece.target.numel()]
                self._read(piece, buffer.numpy().data)
                if stream is None:
                    piece.target.copy_(buffer)
                else:
                    with torch.cuda.stream(stream):
                        piece.target.copy_(buffer, non_blocking=True)
                        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        event.record(stream)
                        copied[turn] = event
                turn ^= 1
                done(piece.target.numel())
            if stream is not None:
                stream.synchronize()
        finally:
            for descriptor in self._files.values():
                os.close(descriptor)

    def _read(self, piece: _Piece, view: memoryview) -> None:
        try:
            if piece.file not in self._files:
                self._files[piece.file] = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
            descriptor = self._files[piece.file]
            filled = _cached(descriptor, view, piece.offset)
            with self._disk if filled < len(view) else nullcontext():
                while filled < len(view):
                    count = os.preadv(descriptor, [view[filled:]], piece.offset + filled)
                    if count <= 0:
                        raise CheckpointError(f"{piece.file}: ends before byte {piece.offset + len(view)}")
                    filled += count
        except OSError as error:
            raise CheckpointError(f"{piece.file}: cannot be read: {error.strerror}") from error


def _cached(descriptor: int, view: memoryview, offset: int) -> int:
    """Bytes of the page cache that stand at the beginning of `view`, read without asking the disk."""
    filled = 0
    try:
        while filled < len(view):
            count = os.preadv(descriptor, [view[filled:]], offset + filled, os.RWF_NOWAIT)
            if count <= 0:
                break
            filled += count
    except OSError:  # nothing there, or a file system that cannot say
        pass
    return filled
