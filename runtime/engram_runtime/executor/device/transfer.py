"""KV and states between a GPU's caches and the host, beside running steps, at the rate of the link.

Scattered pages are packed first: a kernel gathers rows into a staging buffer while the copy engine moves the buffer
before it, two buffers and two streams each way, so a conversation of any length needs 128 MiB of the card. Kernels that
touch host memory themselves would slow decode several times over; the copy engine costs it a percent.

Worker threads call; what they read is finished and under a lease. What they write to was given back by somebody, whose
last step may still be queued when that sequence turned out to have ended: so a write begins after everything that is
submitted, and `settle` returns when it is done. A whole restore goes layer by layer, and the step that reads it may be
queued before that (see `Arrivals`). Bytes that this process gathered (or checked once) carry a digest of their way
through the GPU and are checked with it on the way back, at no cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram_kernels import Ops
from engram_kernels.checksum.reference import new_keys
from engram_kernels.metadata import PAGE
from engram_runtime.errors import SnapshotError
from engram_runtime.executor.device.arena import HostArena, cuts
from engram_runtime.executor.device.arrivals import Arrivals
from engram_runtime.executor.device.lanes import Lane, Piece, rows_of, whole_piece
from engram_runtime.executor.device.paging import RowMover, resolve_checksum, row_mover
from engram_runtime.executor.device.staging import Done, host_buffer, to_host
from engram_runtime.executor.transfer import CacheTransfer
from engram_runtime.models.caches import Caches

GROUP_BYTES = 64 << 20
TO_HOST_BYTES, TO_DEVICE_BYTES = 4 << 20, 16 << 20
"""Copied at a time, since others share the copy engine. Measured on an H200: a state of 57 MB beside 16 decodes cost a
step 0.45 ms in one piece and 0.22 or less in pieces of 4 MiB (which move at 53.0 GB/s instead of 54.1); copies of a few
bytes alone were not held up by either."""
LEAD_BYTES = 640 << 20
"""Of a restore that may be on their way when `write` returns: 12 ms of the link, the time that queuing a step of an 8B
model and computing it behind 26k tokens take. Whoever comes meanwhile waits for that step, so it must not begin much
earlier."""
LAYERS_BYTES = 24 << 20
"""Of a piece that are worth copies and kernels of their own, at the least: a restore of many small pieces goes in
fewer groups of layers."""
STAGING_BYTES = 4 * GROUP_BYTES
"""Of the card, once snapshots are both saved and restored."""


@dataclass(slots=True)
class _Check:
    """A piece on its way to the device, and where its digest will be."""

    piece: Tensor
    digest: Tensor


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Marks of a restore: behind its state, behind all of it."""

    state: Done
    whole: Done


class DeviceTransfer(CacheTransfer):
    """`submitted` gives the mark behind the newest step, None before the first; `arrivals` are the gates of the
    executor's steps. `reserve` gives it pinned memory."""

    def __init__(
        self,
        ops: Ops,
        caches: Caches,
        device: torch.device,
        submitted: Callable[[], Done | None],
        arrivals: Arrivals,
    ) -> None:
        super().__init__(ops, caches)
        self._device, self._submitted, self._arrivals = device, submitted, arrivals
        self._out, self._in = Lane(device), Lane(device)
        self._rows = row_mover(ops, caches.kv) if caches.kv else None
        self._checksum = resolve_checksum(ops)
        self._keys = new_keys(device)
        self._sums = torch.zeros(2, dtype=torch.int64, device=device)
        self._sum_of = (self._sums[:1], self._sums[1:])
        self._found = host_buffer((2,), torch.int64, device)
        """Digests of what is being read, for the one who has the lane to the host; and the same on the host."""
        self._arena: HostArena | None = None
        self._unsettled: dict[int, list[_Check]] = {}
        """By thread."""
        self._tickets = 0
        self._arriving: dict[int, _Arriving] = {}
        """By the number of the restore, until it is settled; and the numbers by thread."""
        self._numbers: dict[int, list[int]] = {}
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # tables and keys are there for every stream

    def reserve(self, nbytes: int, *, verify: bool = True) -> HostArena:
        """Host tensors come from a pinned arena of this size from now on; this object closes it."""
        self._arena = HostArena(nbytes, verify=verify)
        return self._arena

    def close(self) -> None:
        """Wait for what runs, and unpin the host's memory."""
        for lane in (self._out, self._in):
            with lane.lock:
                lane.wait()
        if self._arena is not None:
            self._arena.close()

    # To the host

    @torch.inference_mode()
    def read_kv(self, block_ids: Sequence[int], first: int, count: int) -> Tensor:
        """Tokens [first, first + count) of the sequence with this block table -> host [L, 2, K, count, D]."""
        if self._rows is None or not count:
            return super().read_kv(block_ids, first, count)
        some = self._caches.kv[0]
        heads, dim = some.shape[2], some.shape[4]
        packed = self._host((len(self._caches.kv), 2, heads, count, dim), some.dtype)
        blocks, skipped = block_ids[first // PAGE : -(-(first + count) // PAGE)], first % PAGE
        lane, digest = self._out, self._sum_of[0]
        with lane.lock:
            with lane.on(lane.kernels):
                table = self._table(blocks)
                self._sums.zero_()
            for begin, part in self._groups(packed):
                with lane.on(lane.kernels):
                    stage = lane.buffer(part.nbytes, GROUP_BYTES).view(part.dtype).view(part.shape)
                    self._rows.move(stage, table, begin, skipped, count, 0, to_packed=True)
                    self._add(stage, digest, begin)
                    gathered = lane.mark()
                with lane.on(lane.copies):
                    gathered.hold_back()
                    self._copy(part, stage, to_host=True)
                    lane.release()
            with lane.on(lane.kernels):
                self._found.copy_(self._sums, non_blocking=True)
            lane.wait()
            found = self._found.tolist()
        self._seal(packed, found[0])
        return packed

    @torch.inference_mode()
    def read_state(self, slot: int) -> dict[str, Tensor]:
        """As `CacheTransfer.read_state`: a slot is one span a tensor, so nothing is staged."""
        caches, lane = self._caches, self._out
        if caches.ssm is None or caches.conv is None:
            return {}
        sources = (caches.ssm[slot], caches.conv[slot])
        ssm, conv = targets = [self._host(source.shape, source.dtype) for source in sources]
        with lane.lock:
            with lane.on(lane.copies):
                for target, source in zip(targets, sources, strict=True):
                    self._copy(target, source, to_host=True)
            with lane.on(lane.kernels):
                self._sums.zero_()
                for source, digest in zip(sources, self._sum_of, strict=True):
                    self._add(source, digest, 0)
                self._found.copy_(self._sums, non_blocking=True)
            lane.wait()
            found = self._found.tolist()
        for target, value in zip(targets, found, strict=True):
            self._seal(target, value)
        return {"ssm": ssm, "conv": conv}

    # To the device

    def write_kv(self, block_ids: Sequence[int], first: int, packed: Tensor) -> None:
        """packed [L, 2, K, count, D] becomes tokens [first, first + count), once `settle` has returned.

        A slice of a piece along its tokens is taken from the whole piece, which is checked as a whole.
        """
        if self._rows is None or not packed.numel() or packed.dtype != self._caches.kv[0].dtype:
            super().write_kv(block_ids, first, packed)
            return
        self.write(block_ids, [(first, packed)], None, {})

    def write_state(self, slot: int, tensors: dict[str, Tensor]) -> None:
        """The inverse of `read_state`, once `settle` has returned; ValueError for a missing or misshapen tensor."""
        self.write((), [], slot, tensors)

    @torch.inference_mode()
    def write(
        self,
        block_ids: Sequence[int],
        kv: Sequence[tuple[int, Tensor]],
        state_slot: int | None,
        state: dict[str, Tensor],
    ) -> int:
        """As `KVTransfer.write`: the state, which is needed first, then the layers in their order; returns when at most
        LEAD_BYTES are on their way."""
        lane, rows = self._in, self._rows
        pieces = [(first, packed) for first, packed in kv if packed.numel()]
        if pieces and (rows is None or any(packed.dtype != self._caches.kv[0].dtype for _, packed in pieces)):
            super().write(block_ids, pieces, state_slot, state)
            self._wait()
            return 0
        near: Done | None = None
        with lane.lock:
            if state_slot is not None:
                self._queue_state(state_slot, state)
            with lane.on(lane.kernels):
                there = lane.mark()
            self._tickets += 1
            ticket = self._tickets
            if rows is not None and pieces:
                near = self._queue_layers(ticket, block_ids, pieces, rows)
            with lane.on(lane.kernels):
                if not pieces:  # a step that follows comes to the gates all the same
                    self._arrivals.announce(0, self._arrivals.gates, ticket)
                self._arriving[ticket] = _Arriving(there, lane.mark())
            self._numbers.setdefault(threading.get_ident(), []).append(ticket)
        if near is not None:
            near.wait()
        return ticket

    def follow(self, ticket: int, *, layers: bool) -> None:
        """Hold the current queue back until a restore is there; with `layers` only until its state is, for a step that
        waits for each layer itself."""
        arriving = self._arriving.get(ticket)
        if arriving is not None:
            (arriving.state if layers else arriving.whole).hold_back()

    def settle(self) -> None:
        """Until what this thread wrote is there. SnapshotError when it is not what was once read."""
        lane = self._in
        with lane.lock:
            checks = self._unsettled.pop(threading.get_ident(), [])
            numbers = self._numbers.pop(threading.get_ident(), [])
            try:
                with lane.on(lane.kernels):
                    found = to_host(torch.cat([check.digest for check in checks])) if checks else None
            finally:
                lane.wait()
                for number in numbers:
                    del self._arriving[number]
        if found is None or self._arena is None:
            return
        damaged = False
        for check, value in zip(checks, found.tolist(), strict=True):
            known = self._arena.digest(check.piece)
            if known is None:
                self._seal(check.piece, value)
            elif known != value:
                self._arena.unseal(check.piece)  # the next one who wants it checks it on the host, and drops it
                damaged = True
        if damaged:
            raise SnapshotError("host tier: checksum does not match, the bytes are damaged")

    # Parts

    def _queue_state(self, slot: int, tensors: dict[str, Tensor]) -> None:
        lane = self._in
        with lane.on(lane.kernels):
            self._after_submitted()
            for cache, value in self._checked_state(tensors):
                self._copy(value, cache[slot], to_host=False)
                digest = self._zero()
                self._add(cache[slot], digest, 0)
                self._expect(value, digest)

    def _queue_layers(
        self, ticket: int, block_ids: Sequence[int], kv: Sequence[tuple[int, Tensor]], rows: RowMover
    ) -> Done | None:
        """All pieces, some layers of each at a time; the mark behind which LEAD_BYTES are left, None for the start."""
        lane, gates = self._in, self._arrivals.gates
        table, pieces = self._prepare(block_ids, kv)
        left = sum(piece.whole.nbytes for piece in pieces)
        groups = max(1, min(gates, left // (len(pieces) * LAYERS_BYTES)))
        near: Done | None = None
        for group in range(groups):
            first, end = group * gates // groups, (group + 1) * gates // groups
            layers = self._arrivals.first_layer(first), self._arrivals.first_layer(end)
            for piece in pieces:
                for begin, part in self._groups(piece.whole, *(layer * piece.layer_rows for layer in layers)):
                    far = left > LEAD_BYTES
                    self._queue_part(piece, begin, part, table, rows)
                    left -= part.nbytes
                    if far and left <= LEAD_BYTES:
                        with lane.on(lane.kernels):
                            near = lane.mark()
            with lane.on(lane.kernels):
                self._arrivals.announce(first, end, ticket)
        for piece in pieces:
            self._expect(piece.whole, piece.digest)
        return near

    def _prepare(self, block_ids: Sequence[int], kv: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, list[Piece]]:
        """The table [n] int32 on the device, and the pieces."""
        lane = self._in
        with lane.on(lane.kernels):
            self._after_submitted()
            pieces = [Piece(*whole_piece(packed), first, packed.shape[3], self._zero()) for first, packed in kv]
            return self._table(block_ids), pieces

    def _queue_part(self, piece: Piece, begin: int, part: Tensor, table: Tensor, rows: RowMover) -> None:
        """Rows of a piece, from row `begin` on, to a staging buffer and from there to their pages."""
        lane = self._in
        with lane.on(lane.copies):
            stage = lane.buffer(part.nbytes, GROUP_BYTES).view(part.dtype).view(part.shape)
            self._copy(part, stage, to_host=False)
            arrived = lane.mark()
        with lane.on(lane.kernels):
            arrived.hold_back()
            self._add(stage, piece.digest, begin)
            rows.move(stage, table, begin, piece.first, piece.count, piece.skip, to_packed=False)
            lane.release()

    def _wait(self) -> None:
        """Until everything is there that this thread queued."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._in.wait()

    def _host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype) if self._arena is None else self._arena.empty(shape, dtype)

    def _table(self, block_ids: Sequence[int]) -> Tensor:
        """[n] int32 on the device, sent without waiting."""
        host = host_buffer((len(block_ids),), torch.int32, self._device)
        host.numpy()[:] = block_ids
        return host.to(self._device, non_blocking=True)

    def _zero(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self._device)

    def _groups(self, packed: Tensor, first: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """(row, rows [n, count, D]) of rows [first, end) of a packed piece, as many at a time as a buffer holds."""
        count, dim = packed.shape[3:]
        rows = packed.view(-1, count, dim)[first:end]
        step = GROUP_BYTES // (count * dim * packed.element_size())
        if not step:
            raise ValueError(f"{count} tokens are too many: one head of them has {rows[0].nbytes} bytes")
        parts = rows.split_with_sizes(cuts(rows.shape[0], step))
        yield from zip(range(first, first + rows.shape[0], step), parts, strict=True)

    def _copy(self, host: Tensor, device: Tensor, *, to_host: bool) -> None:
        """All of one to the other, on the current queue; one call, since each takes the interpreter from others."""
        most = TO_HOST_BYTES if to_host else TO_DEVICE_BYTES
        target, source = (host, device) if to_host else (device, host)
        sizes = cuts(host.nbytes, most) if self._arena is None else self._arena.cuts(host, most)
        if len(sizes) == 1:
            target.copy_(source, non_blocking=True)
            return
        items = [size // host.element_size() for size in sizes]
        # Of tensors on different devices it copies one after the other, as `copy_` does.
        torch._foreach_copy_(
            target.view(-1).split_with_sizes(items), source.view(-1).split_with_sizes(items), non_blocking=True
        )

    def _add(self, rows: Tensor, digest: Tensor, first_row: int) -> None:
        """Digest of rows [n, ...]; nothing where their bytes are no whole words."""
        if rows.nbytes // rows.shape[0] % 8 == 0:
            words = rows.view(rows.shape[0], -1).view(torch.int64)
            self._checksum(words, self._keys, digest, first_row)

    def _seal(self, piece: Tensor, digest: int) -> None:
        if self._arena is not None and piece.nbytes // rows_of(piece) % 8 == 0:
            self._arena.seal(piece, digest)

    def _expect(self, piece: Tensor, digest: Tensor) -> None:
        self._unsettled.setdefault(threading.get_ident(), []).append(_Check(piece, digest))

    def _after_submitted(self) -> None:
        newest = self._submitted()
        if newest is not None:
            newest.hold_back()
