"""A folder as an object store: the disk tier, and `file://` repositories shared by processes over one volume.

Every put is: temporary file, write, fsync, rename (or link, where the key must be absent), fsync of the folder. So a
crash leaves a whole object or none, and what was reported stored survives a power cut.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.io.direct import BLOCK, LARGE, DirectIO
from engram_runtime.snapshots.io.filesystem import FileSystem
from engram_runtime.snapshots.io.store import ObjectInfo, StoreUnavailable, Truncated

_KEY = re.compile(r"[0-9a-z]+(?:/[0-9a-z]+)*")
_REASONS = {
    errno.ENOSPC: "DiskFull",
    errno.EDQUOT: "DiskFull",
    errno.EFBIG: "DiskFull",
    errno.EACCES: "Unwritable",
    errno.EPERM: "Unwritable",
    errno.EROFS: "Unwritable",
    errno.ENOENT: "FolderMissing",
    errno.ENOTDIR: "FolderMissing",
}
TEMPORARY = "tmp"
LOCKS = "locks"


class LocalStore:
    """Objects as files below `root` (created 0700, files 0600). Implements io.store.ObjectStore."""

    def __init__(self, root: Path, filesystem: FileSystem | None = None) -> None:
        self.root = root
        self._fs = filesystem or FileSystem()
        self._direct = DirectIO(self._fs)

    @property
    def report(self) -> str:
        """What people should know about how this folder is read and written; empty when there is nothing."""
        return self._direct.report

    def probe(self) -> None:
        key = f"probe/{secrets.token_hex(16)}"
        try:
            self.put(key, [b"first"], if_absent=True)
            with suppress(Conflict):
                self.put(key, [b"second"], if_absent=True)
                raise StoreUnavailable("ConditionalWrites", f"{self.root}: a second conditional write was not refused")
            data, tag = self.get_tagged(key)
            if data != b"first":
                raise StoreUnavailable("ReadBack", f"{self.root}: read back something else than was written")
            self.compare_and_swap(key, b"third", tag)
            with suppress(Conflict):
                self.compare_and_swap(key, b"fourth", tag)
                raise StoreUnavailable("ConditionalWrites", f"{self.root}: a stale compare-and-swap was not refused")
        finally:
            with suppress(StoreUnavailable):
                self.delete(key)

    def put(self, key: str, parts: Sequence[memoryview | bytes], *, if_absent: bool = False) -> None:
        with self._reported("write", key):
            target = self._target(key)
            temporary = self._write_temporary(parts)
            try:
                if if_absent:
                    try:
                        self._fs.link(temporary, target)
                    except FileExistsError:
                        raise Conflict(f"{key} exists") from None
                    self._fs.unlink(temporary)
                else:
                    self._fs.rename(temporary, target)
            except BaseException:
                self._discard(temporary)
                raise
            self._fs.sync_directory(target.parent)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._opened(key) as (descriptor, size):
            end = size if length is None else min(size, start + length)
            buffer = bytearray(max(0, end - start))
            done = self._fill(descriptor, memoryview(buffer), start)
            return bytes(memoryview(buffer)[:done])

    def front(self, key: str, length: int) -> tuple[bytes, int]:
        with self._opened(key) as (descriptor, size):
            buffer = bytearray(min(size, length))
            done = self._fill(descriptor, memoryview(buffer), 0)
            return bytes(memoryview(buffer)[:done]), size

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        data = self.get(key)
        return data, hashlib.sha256(data).hexdigest()

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        with self._opened(key) as (descriptor, size):
            view = buffer.cast("B")
            if start + len(view) > size:
                raise Truncated(f"{key} ends before byte {start + len(view)}")
            done = 0
            if len(view) >= LARGE:
                with self._truncation(key, start, view):
                    done = self._direct.read(self._path(key), start, view)
            if done + self._fill(descriptor, view[done:], start + done) < len(view):
                raise Truncated(f"{key} ends before byte {start + len(view)}")

    def head(self, key: str) -> ObjectInfo:
        with self._reported("read", key):
            status = self._fs.status(self._path(key))
            if not stat.S_ISREG(status.st_mode):
                raise NotFound(f"{key} is not an object")
            return ObjectInfo(key, status.st_size, status.st_mtime)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._reported("delete", key):
            try:
                self._fs.unlink(path)
            except FileNotFoundError:
                return
            self._fs.sync_directory(path.parent)

    def delete_many(self, keys: Sequence[str]) -> None:
        trouble: StoreUnavailable | None = None
        for key in keys:
            try:
                self.delete(key)
            except StoreUnavailable as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble

    def now(self) -> float | None:
        return None

    def touch(self, key: str) -> None:
        with self._reported("touch", key):
            self._fs.touch(self._path(key))

    def list(self, prefix: str, *, after: str | None = None, limit: int = 1000) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        with self._reported("list", prefix):
            for key in self._walk("", prefix, after or ""):
                try:
                    status = self._fs.status(self.root / key)
                except FileNotFoundError:
                    continue  # deleted since the folder was read
                found.append(ObjectInfo(key, status.st_size, status.st_mtime))
                if len(found) >= limit:
                    break
        return found

    def compare_and_swap(self, key: str, data: bytes, expected: str | None) -> str:
        with self._reported("write", key):
            target = self._target(key)
            lock = self._folder(self.root / LOCKS) / hashlib.sha256(key.encode()).hexdigest()[:2]
            with self._fs.locked(lock):
                try:
                    current: str | None = self.get_tagged(key)[1]
                except NotFound:
                    current = None
                if current != expected:
                    raise Conflict(f"{key} has moved")
                temporary = self._write_temporary([data])
                try:
                    self._fs.rename(temporary, target)
                except BaseException:
                    self._discard(temporary)
                    raise
                self._fs.sync_directory(target.parent)
        return hashlib.sha256(data).hexdigest()

    def close(self) -> None:
        """Stops the threads of large reads and writes; nothing is held open between calls."""
        self._direct.close()

    def clean_uploads(self, older_than: float) -> int:
        count = 0
        for name, is_folder in self._fs.names(self.root / TEMPORARY):
            path = self.root / TEMPORARY / name
            with suppress(OSError):
                if not is_folder and self._fs.status(path).st_mtime < older_than:
                    self._fs.unlink(path)
                    count += 1
        return count

    def _path(self, key: str) -> Path:
        """Keys come from policy.keys; this is the second lock on the door."""
        if _KEY.fullmatch(key) is None:
            raise ValueError(f"key must be lower-case letters, digits and single slashes, got {key[:80]!r}")
        return self.root / key

    def _target(self, key: str) -> Path:
        path = self._path(key)
        self._folder(path.parent)
        return path

    def _folder(self, path: Path) -> Path:
        """Make the folder and what is above it, durably."""
        missing = []
        while not os.path.isdir(path / "."):
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            with suppress(FileExistsError):
                self._fs.make_directory(folder)
            self._fs.sync_directory(folder.parent)
            path = folder
        return path

    def _write_temporary(self, parts: Sequence[memoryview | bytes]) -> Path:
        path = self._folder(self.root / TEMPORARY) / secrets.token_hex(16)
        descriptor = self._fs.create(path)
        try:
            views = [memoryview(part).cast("B") for part in parts]
            if any(len(view) >= LARGE for view in views):
                self._write_large(path, descriptor, views)
            else:
                for view in views:
                    rest = view
                    while len(rest):
                        rest = rest[self._fs.write(descriptor, rest) :]
            self._fs.sync(descriptor)
        except BaseException:
            self._fs.close(descriptor)
            self._discard(path)
            raise
        self._fs.close(descriptor)
        return path

    def _write_large(self, path: Path, descriptor: int, views: Sequence[memoryview]) -> None:
        """Whole blocks of large parts past the page cache, the rest through it: never both in one block."""
        direct: list[tuple[memoryview, int]] = []
        plain: list[tuple[memoryview, int]] = []
        offset = 0
        for view in views:
            blocks = len(view) // BLOCK * BLOCK if len(view) >= LARGE and offset % BLOCK == 0 else 0
            if blocks:
                direct.append((view[:blocks], offset))
            plain.append((view[blocks:], offset + blocks))
            offset += len(view)
        self._fs.resize(descriptor, offset)
        if not self._direct.write(path, direct):
            plain += direct
        for view, at in plain:
            done = 0
            while done < len(view):
                done += self._fs.write_at(descriptor, view[done:], at + done)

    @contextmanager
    def _truncation(self, key: str, start: int, view: memoryview) -> Iterator[None]:
        try:
            yield
        except EOFError:  # it became shorter since it was opened
            raise Truncated(f"{key} ends before byte {start + len(view)}") from None

    def _discard(self, path: Path) -> None:
        with suppress(OSError):
            self._fs.unlink(path)

    def _fill(self, descriptor: int, view: memoryview, start: int) -> int:
        done = 0
        while done < len(view):
            count = self._fs.read_at(descriptor, view[done:], start + done)
            if not count:
                break
            done += count
        return done

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[str]:
        """Keys below `folder` in ascending order, skipping folders that cannot hold one."""
        for name, is_folder in self._fs.names(self.root / folder):
            path = f"{folder}{name}"
            if not folder and name in (TEMPORARY, LOCKS, "probe"):
                continue
            if is_folder:
                path += "/"
                overlaps = path.startswith(prefix) or prefix.startswith(path)
                if overlaps and not (path < after and not after.startswith(path)):
                    yield from self._walk(path, prefix, after)
            elif path.startswith(prefix) and path > after:
                yield path

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        with self._reported("read", key):
            descriptor = self._fs.open(self._path(key))
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise NotFound(f"{key} is not an object")
                yield descriptor, status.st_size
            finally:
                self._fs.close(descriptor)

    @contextmanager
    def _reported(self, action: str, key: str) -> Iterator[None]:
        """System errors as the protocol's errors."""
        try:
            yield
        except FileNotFoundError as error:
            if action == "write":
                raise StoreUnavailable("FolderMissing", f"cannot {action} {key}: {error}") from error
            raise NotFound(f"{key} does not exist") from None
        except IsADirectoryError:
            raise NotFound(f"{key} is not an object") from None
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, "InputOutput")
            raise StoreUnavailable(reason, f"cannot {action} {key}: {error.strerror or error}") from error
