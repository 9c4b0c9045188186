"""Checksums of stored tensors: BLAKE3 (about four times faster), or SHA-256 where its wheel is missing.

Large tensors are hashed by several threads: BLAKE3 is a tree by nature, SHA-256 is made one here (the hash of the
hashes of 1 MiB pieces, "sha256-1m"). A turn's 57 MB of state would otherwise take 45 ms before anybody can find it.
Whoever hashes lets other threads run meanwhile, but takes the interpreter once a piece: so there is little Python
around a piece, and few threads.

A checksum finds damage; it does not prove origin. Authenticity is the manifest's HMAC, which covers the checksums.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from engram_runtime.errors import SnapshotError

try:
    import blake3
except ImportError:
    HAVE_BLAKE3 = False
else:
    HAVE_BLAKE3 = True

logger = logging.getLogger(__name__)

_PARALLEL_ABOVE = 1 << 20  # waking threads costs more than hashing a megabyte
_PIECE = 1 << 20
_HELPERS = max(1, min(3, (os.cpu_count() or 1) - 1))


def _blake3(data: memoryview) -> str:
    threads = blake3.blake3.AUTO if data.nbytes > _PARALLEL_ABOVE else 1
    return blake3.blake3(data, max_threads=threads).hexdigest()


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class _Pieces:
    """The pieces of one digest: everybody who works on them takes one after the other until none is left."""

    def __init__(self, data: memoryview) -> None:
        self._data = data.cast("B")
        self.count = -(-self._data.nbytes // _PIECE)
        self._hashes = [b""] * self.count
        self._next = iter(range(self.count))  # shared: no two threads get the same number
        self._hashed = itertools.count(1)
        self._error: BaseException | None = None
        self._all = threading.Lock()
        if self.count:
            self._all.acquire()

    def work(self) -> None:
        data, hashes, sha256 = self._data, self._hashes, hashlib.sha256
        for piece in self._next:
            try:
                if self._error is None:
                    start = piece * _PIECE
                    hashes[piece] = sha256(data[start : start + _PIECE]).digest()
            except BaseException as error:  # of whichever thread: it is the caller's
                self._error = error
            if next(self._hashed) == self.count:
                self._all.release()

    def result(self) -> str:
        """When the others are done too; what went wrong in any of them is raised."""
        self._all.acquire()
        self._data = memoryview(b"")  # an invitation that nobody took yet keeps no tensor
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it knows this frame
        return hashlib.sha256(b"".join(self._hashes)).hexdigest()


class _Helpers:
    """Threads that hash beside those who want a digest; few, however many digests are wanted at once.

    They are only ever invited, and a caller that nobody helps does everything itself: so nobody waits for a thread that
    is busy elsewhere, could not be started, or is not there any more (after a fork, at the interpreter's end).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.start_anew()

    def start_anew(self) -> None:
        """In a forked process: threads, and who holds which lock, stayed behind."""
        self._invitations: SimpleQueue[_Pieces] = SimpleQueue()
        self._lock = threading.Lock()
        self._running = 0

    def invite(self, pieces: _Pieces) -> None:
        """As many as there is work for, and no more than will soon come."""
        number = min(self._limit, pieces.count - 1)
        if self._running < number:
            self._start(number)
        for _ in range(min(number, self._running) - self._invitations.qsize()):
            self._invitations.put(pieces)

    def _start(self, number: int) -> None:
        with self._lock:
            while self._running < number:
                try:
                    threading.Thread(target=self._run, name=f"engram-hash-{self._running}", daemon=True).start()
                except RuntimeError as error:
                    logger.warning("large checksums take longer, a thread could not be started: %s", error)
                    self._limit = self._running
                    return
                self._running += 1

    def _run(self) -> None:
        invitations = self._invitations
        while True:
            invitations.get().work()  # without a name, which would keep a tensor until the next one comes


_helpers = _Helpers(_HELPERS)
"""Of the process: that is what bounds the threads."""
os.register_at_fork(after_in_child=_helpers.start_anew)


def _sha256_tree(data: memoryview) -> str:
    pieces = _Pieces(data)
    if pieces.count > 1:
        _helpers.invite(pieces)
    pieces.work()
    return pieces.result()


_ALGORITHMS: dict[str, Callable[[memoryview], str]] = {"sha256": _sha256, "sha256-1m": _sha256_tree}
if HAVE_BLAKE3:
    _ALGORITHMS["blake3"] = _blake3


def digest(data: memoryview) -> str:
    """ "blake3:<64 hex>", or "sha256:<64 hex>" and above 1 MiB "sha256-1m:<64 hex>"."""
    if "blake3" in _ALGORITHMS:
        algorithm = "blake3"
    else:
        algorithm = "sha256" if data.nbytes <= _PARALLEL_ABOVE else "sha256-1m"
    return f"{algorithm}:{_ALGORITHMS[algorithm](data)}"


def check(data: memoryview, expected: str, what: str) -> None:
    """SnapshotError unless `data` has the digest `expected`; also when its algorithm is not installed here."""
    algorithm, _, value = expected.partition(":")
    function = _ALGORITHMS.get(algorithm)
    if function is None:
        raise SnapshotError(f"{what}: cannot be checked, {algorithm!r} is not installed")
    if function(data) != value:
        raise SnapshotError(f"{what}: checksum does not match, the bytes are damaged")
