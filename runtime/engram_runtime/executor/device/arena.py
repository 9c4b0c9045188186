"""Host memory that the device copies at link speed: one span, registered once, handed out in pieces.

Pinning memory costs 0.1 s a GB and cannot be done per snapshot; ordinary memory is copied at a fifth of the link. So
the host tier's whole budget is reserved at start as huge pages, and slab by slab made known to the device by a thread
while the weights load. A piece goes back when the last tensor that shares it is gone, whoever held it. What does not
fit, or comes before its slab is ready, gets ordinary memory: slower, and right all the same. Small pieces are taken
from the far end, so that what they leave behind does not break up the room of large ones.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 30
"""Registered at a time: about 40 ms during which the driver serves nobody else."""
ALIGNMENT = 4096
"""Of every piece: direct reads from disks go straight into it."""
SMALL_BYTES = 4 << 20
RECLAIM_TIMES = 4
"""Times its size that may be let go of for one piece: what is let go may still be held by somebody, or lie apart."""

Register = Callable[[int, int], None]
"""Makes (address, bytes) known to the device; OSError when it cannot."""


class HostArena:
    """Thread-safe. `reclaim(nbytes)`, once set, is asked to let go of that much when there is no room for a piece; it
    answers whether it let go of anything.

    `register` and `unregister` are the device's; tests hand in their own. verify False: digests are not kept.
    """

    def __init__(
        self,
        nbytes: int,
        register: Register | None = None,
        unregister: Callable[[int], None] | None = None,
        *,
        verify: bool = True,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self.capacity = nbytes // ALIGNMENT * ALIGNMENT
        self.reclaim: Callable[[int], bool] | None = None
        self._register, self._unregister = register or _cuda_register, unregister or _cuda_unregister
        self._verify, self._slab = verify, slab_bytes
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []
        """(offset, bytes) of what is free, ascending, no two of them touching."""
        self._returned: deque[tuple[int, int]] = deque()
        """Pieces whose last tensor died: a destructor may run anywhere, so it takes no lock."""
        self._digests: dict[int, int] = {}
        """By address: the device's digest of a piece that it wrote or has checked."""
        self._registered: list[int] = []
        self._ready = 0
        self._refused = False
        self._closed = False
        self._map = mmap.mmap(-1, max(self.capacity, ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower to register, nothing else
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._address = int(self._bytes.ctypes.data)
        self._thread = threading.Thread(target=self._prepare, name="engram-arena", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> int:
        """Bytes registered so far."""
        return self._ready

    def wait(self, timeout: float | None = None) -> bool:
        """Until all of it is registered (or registering failed); False when that took too long."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised host tensor; from the arena if there is room."""
        nbytes = math.prod(shape) * dtype.itemsize
        offset = self._take(nbytes) if nbytes else None
        if self.reclaim is not None and 0 < nbytes <= self._ready:
            for _ in range(RECLAIM_TIMES):
                if offset is not None or not self.reclaim(nbytes):
                    break
                offset = self._take(nbytes)
        if offset is None:
            if nbytes and self._ready == self.capacity and not self._refused:
                self._refused = True
                logger.warning("host snapshot memory is full or in pieces: some snapshots use ordinary memory")
            return torch.empty(tuple(shape), dtype=dtype)
        piece = self._bytes[offset : offset + nbytes]
        returned = weakref.finalize(piece, self._returned.append, (offset, _rounded(nbytes)))
        returned.atexit = False
        return torch.frombuffer(piece, dtype=dtype).view(tuple(shape))

    def cuts(self, tensor: Tensor, most: int) -> list[int]:
        """Bytes of the parts, `most` at most, in which a contiguous tensor is copied: no copy may cross from one slab
        to the next."""
        nbytes, start = tensor.nbytes, tensor.data_ptr() - self._address
        if not 0 <= start < self.capacity:
            return cuts(nbytes, most)
        found = list[int]()
        while nbytes:
            room = min(nbytes, self._slab - start % self._slab)
            found += cuts(room, most)
            start, nbytes = start + room, nbytes - room
        return found

    def seal(self, tensor: Tensor, digest: int) -> None:
        """Remember the device's digest of all of a piece."""
        if self._verify and self._holds(tensor):
            with self._lock:
                self._collect()
                self._digests[tensor.data_ptr()] = digest

    def unseal(self, tensor: Tensor) -> None:
        """What is in this piece is not trusted any more."""
        with self._lock:
            self._digests.pop(tensor.data_ptr(), None)

    def digest(self, tensor: Tensor) -> int | None:
        """What `seal` was told of this piece."""
        with self._lock:
            self._collect()
            return self._digests.get(tensor.data_ptr())

    def is_sealed(self, tensor: Tensor) -> bool:
        """Whether the device will check this piece when it takes it."""
        return self.digest(tensor) is not None

    @property
    def free(self) -> int:
        """Bytes that could be handed out now."""
        with self._lock:
            self._collect()
            return sum(size for _, size in self._free)

    def close(self) -> None:
        """No copies may be under way. Tensors stay valid, as ordinary memory."""
        with self._lock:
            self._closed = True
            self._free.clear()
        self._thread.join()
        for address in self._registered:
            self._unregister(address)
        self._registered.clear()

    def _prepare(self) -> None:
        for offset in range(0, self.capacity, self._slab):
            if self._closed:
                return
            size = min(self._slab, self.capacity - offset)
            torch.from_numpy(self._bytes[offset : offset + size]).zero_()  # touched by all cores before it is pinned
            try:
                self._register(self._address + offset, size)
            except (OSError, RuntimeError) as error:
                logger.warning("host snapshot memory: %d bytes are used, not %d: %s", offset, self.capacity, error)
                return
            self._registered.append(self._address + offset)
            with self._lock:
                if not self._closed:
                    self._ready += size
                    self._put_back(offset, size)

    def _holds(self, tensor: Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._address < self.capacity

    def _take(self, nbytes: int) -> int | None:
        """The offset of the first free span that is large enough; for a small piece, of the end of the last one."""
        size = _rounded(nbytes)
        small = nbytes < SMALL_BYTES
        with self._lock:
            self._collect()
            spans = range(len(self._free))
            for index in reversed(spans) if small else spans:
                offset, room = self._free[index]
                if room < size:
                    continue
                if room == size:
                    del self._free[index]
                else:
                    self._free[index] = (offset, room - size) if small else (offset + size, room - size)
                return offset + room - size if small else offset
        return None

    def _collect(self) -> None:
        while self._returned:
            offset, size = self._returned.popleft()
            self._digests.pop(self._address + offset, None)
            if not self._closed:
                self._put_back(offset, size)

    def _put_back(self, offset: int, size: int) -> None:
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and offset + size == self._free[at][0]:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, size = self._free[at - 1][0], self._free[at - 1][1] + size
            self._free[at - 1] = offset, size
        else:
            self._free.insert(at, (offset, size))


def cuts(total: int, most: int) -> list[int]:
    """Sizes of the parts of a whole: `most` each, and what is left."""
    whole, rest = divmod(total, most)
    return [most] * whole + [rest] * bool(rest)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _cuda_register(address: int, nbytes: int) -> None:
    error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        raise OSError(f"the device refused to pin them ({error})")


def _cuda_unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
