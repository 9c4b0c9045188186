"""Large reads and writes past the page cache, by several threads: what a disk gives is what a restore gets.

One thread that reads through the page cache reaches a good part of a disk's rate and none of it twice; a snapshot is
read once, and its pages would push out weights and what other processes need. Opening a file for direct I/O can succeed
and the first read or write be refused (overlay file systems): then everything goes through the cache, and `report` says
so.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engram_runtime.snapshots.io.filesystem import FileSystem

BLOCK = 4096
CHUNK = 4 << 20
THREADS = 4
"""Four of 4 MiB reach what eight do, and sometimes more."""
LARGE = 1 << 20
"""Below, one ordinary call is faster."""
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)


class DirectIO:
    """Thread-safe. `report` is empty while direct I/O works."""

    def __init__(self, filesystem: FileSystem) -> None:
        self._fs = filesystem
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._scratch = threading.local()
        self.report = ""

    def close(self) -> None:
        """Let the threads go; the next large transfer starts new ones."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False)
                self._threads = None

    def read(self, path: Path, offset: int, view: memoryview) -> int:
        """Bytes read into the beginning of `view` from a multiple of BLOCK: whole blocks only, 0 where it cannot be.

        The caller reads the rest. OSError as the system reports it.
        """
        size = len(view) // BLOCK * BLOCK
        return size if self._done(path, os.O_RDONLY, offset, [(view[:size], 0)], self._read) else 0

    def write(self, path: Path, parts: Sequence[tuple[memoryview, int]]) -> bool:
        """Write each part, whole blocks at a multiple of BLOCK. False where it cannot be: some may be written then."""
        return self._done(path, os.O_WRONLY, 0, parts, self._write)

    def _done(
        self,
        path: Path,
        mode: int,
        base: int,
        parts: Sequence[tuple[memoryview, int]],
        move: Callable[[int, memoryview, int], None],
    ) -> bool:
        if self.report or base % BLOCK:
            return False
        try:
            descriptor = self._fs.open_direct(path, mode)
        except OSError as error:
            return self._refused(error)
        try:
            with self._lock:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="engram-disk")
                jobs = [
                    self._threads.submit(move, descriptor, view[at : at + CHUNK], base + offset + at)
                    for view, offset in parts
                    for at in range(0, len(view), CHUNK)
                ]
            trouble: BaseException | None = None
            for job in jobs:  # all of them: none may use the descriptor after it is closed
                trouble = job.exception() or trouble
            if isinstance(trouble, OSError):
                return self._refused(trouble)
            if trouble is not None:
                raise trouble
            return True
        finally:
            self._fs.close(descriptor)

    def _refused(self, error: OSError) -> bool:
        if error.errno not in UNSUPPORTED:
            raise error
        self.report = "the file system refuses direct I/O: reads and writes go through the page cache"
        return False

    def _read(self, descriptor: int, view: memoryview, offset: int) -> None:
        target = view if _is_aligned(view) else self._buffer()[: len(view)]
        done = 0
        while done < len(view):
            count = self._fs.read_at(descriptor, target[done:], offset + done)
            if count <= 0 or count % BLOCK:
                raise EOFError(f"the file ends after byte {offset + done + count}")
            done += count
        if target is not view:
            view[:] = target

    def _write(self, descriptor: int, view: memoryview, offset: int) -> None:
        source = view
        if not _is_aligned(view):
            source = self._buffer()[: len(view)]
            source[:] = view
        done = 0
        while done < len(view):
            done += self._fs.write_at(descriptor, source[done:], offset + done)

    def _buffer(self) -> memoryview:
        """This thread's aligned memory."""
        found: memoryview | None = getattr(self._scratch, "view", None)
        if found is None:
            found = self._scratch.view = memoryview(mmap.mmap(-1, CHUNK))
        return found


def _is_aligned(view: memoryview) -> bool:
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK == 0
