"""The few system calls that durability is made of, as one object.

A save is correct only if a crash between any two of these calls leaves the old state or the new one. Tests hand in a
subclass that dies, or fails, at the n-th call; production uses this one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FileSystem:
    """Mutating calls first. Every method raises OSError as the system call does."""

    def make_directory(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def create(self, path: Path) -> int:
        """A new file, never an existing one, open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Bytes written, possibly fewer than given."""
        return os.write(descriptor, data)

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Bytes written at `offset`, possibly fewer than given."""
        return os.pwritev(descriptor, [data], offset)

    def resize(self, descriptor: int, size: int) -> None:
        """Make the file `size` bytes long, so that its parts may be written in any order."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """FileExistsError when the target is there: the atomic "if absent"."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def touch(self, path: Path) -> None:
        os.utime(path)

    # Reads change nothing, so a crash inside one is a crash before or after it.

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def open_direct(self, path: Path, mode: int) -> int:
        """Open past the page cache; mode is O_RDONLY or O_WRONLY. Changes nothing by itself."""
        return os.open(path, mode | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Bytes read, possibly fewer than the buffer holds; 0 at the end."""
        return os.preadv(descriptor, [buffer], offset)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def status(self, path: Path) -> os.stat_result:
        return os.stat(path, follow_symlinks=False)

    def names(self, path: Path) -> list[tuple[str, bool]]:
        """(name, is a directory) of each entry, sorted; [] when the folder is not there."""
        try:
            with os.scandir(path) as entries:
                return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Exclusive between threads and processes; the kernel lets go when the holder dies."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
