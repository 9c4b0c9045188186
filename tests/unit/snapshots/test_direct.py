"""Large objects in a folder: past the page cache or through it, the same bytes, and the same errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engram_runtime.snapshots.io import direct
from engram_runtime.snapshots.io.filesystem import FileSystem
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.io.store import StoreUnavailable, Truncated


class Counting(FileSystem):
    """Counts direct opens; refuses direct I/O at the open or at the first transfer, or fails it, when told to."""

    def __init__(self, refuse: str = "", error: int = errno.EINVAL) -> None:
        self.refuse, self.error, self.opened = refuse, error, 0
        self._direct: set[int] = set()

    def open_direct(self, path: Path, mode: int) -> int:
        if self.refuse == "open":
            raise OSError(self.error, "no")
        self.opened += 1
        descriptor = os.open(path, mode)  # through the cache: not every folder that tests run in can do better
        self._direct.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._direct.discard(descriptor)
        super().close(descriptor)

    def _fail(self, descriptor: int) -> None:
        if self.refuse == "transfer" and descriptor in self._direct:
            raise OSError(self.error, "no")

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self._fail(descriptor)
        return super().read_at(descriptor, buffer, offset)

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        self._fail(descriptor)
        return super().write_at(descriptor, data, offset)


def content(size: int) -> bytes:
    return bytes(range(251)) * (size // 251 + 1)


@pytest.mark.parametrize("refuse", ["", "open", "transfer"])
@pytest.mark.parametrize("size", [direct.LARGE - 1, direct.LARGE, 3 * direct.CHUNK + 12345])
def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: str, size: int) -> None:
    monkeypatch.setattr(direct, "CHUNK", direct.LARGE)
    filesystem = Counting(refuse)
    store = LocalStore(tmp_path, filesystem)
    data = content(size)[:size]
    front = bytes(8192)
    store.put("a/b", [front, data, b"tail"])
    assert (tmp_path / "a/b").read_bytes() == front + data + b"tail"
    buffer = bytearray(size + 3)
    view = memoryview(buffer)[3:]  # at an odd address
    store.read_into("a/b", 8192, view)
    assert bytes(view) == data
    part = memoryview(bytearray(size - 100))
    store.read_into("a/b", 8192 + 100, part)  # from an odd offset
    assert bytes(part) == data[100:]
    with pytest.raises(Truncated):
        store.read_into("a/b", 8192, memoryview(bytearray(size + 100)))
    assert bool(filesystem.opened) == (size >= direct.LARGE and refuse != "open")
    assert bool(store.report) == (size >= direct.LARGE and refuse != "")
    store.close()
    store.put("a/c", [data])  # a closed store is a store that holds nothing open
    assert (tmp_path / "a/c").read_bytes() == data
    store.close()


@pytest.mark.parametrize("refuse", ["open", "transfer"])
def test_other_trouble_is_reported_and_leaves_nothing(tmp_path: Path, refuse: str) -> None:
    store = LocalStore(tmp_path, Counting(refuse, errno.ENOSPC))
    with pytest.raises(StoreUnavailable) as caught:
        store.put("a/b", [content(direct.LARGE)])
    assert caught.value.reason == "DiskFull"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert store.report == ""


def test_parts_that_do_not_begin_on_a_block_go_through_the_cache(tmp_path: Path) -> None:
    filesystem = Counting()
    store = LocalStore(tmp_path, filesystem)
    large = content(2 * direct.LARGE)
    store.put("x", [b"odd", large])
    assert (tmp_path / "x").read_bytes() == b"odd" + large


def test_a_real_folder_keeps_large_objects(tmp_path: Path) -> None:
    """With whatever this machine's file system does with O_DIRECT."""
    store = LocalStore(tmp_path)
    data = content(5 * direct.LARGE)
    store.put("big", [data])
    view = memoryview(bytearray(len(data)))
    store.read_into("big", 0, view)
    assert bytes(view) == data
    assert store.get("big") == data
