"""Safetensors files, written 4 KiB-aligned and read without trust. See docs/snapshot-format.md.

The file is `u64 header length | JSON header | data`. Any safetensors library reads ours: alignment gaps are explicit U8
tensors named `pad.<i>`, and the header is padded with spaces. The reader checks everything before anybody allocates: a
file from a stranger can at worst be refused.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.policy.manifest import parse_json_object

ALIGNMENT = 4096
MAX_HEADER_BYTES = 100 * 1024 - 8  # with the length field: 25 pages
MAX_FILE_BYTES = 1 << 40
MAX_TENSORS = 256
MAX_RANK = 8
ITEM_BITS = {"U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F16": 16, "BF16": 16, "U32": 32, "F32": 32}
_JSON = json.JSONEncoder(separators=(",", ":"))
_PAD = bytes(ALIGNMENT)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor to be written: safetensors dtype name, shape, and its bytes (C order, little-endian)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor found in a header. `offset` is absolute in the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileImage:
    """A file as it will be stored: parts to be written one after the other."""

    parts: tuple[memoryview, ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Header:
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int


def build(tensors: Sequence[TensorPart], metadata: Mapping[str, str]) -> FileImage:
    """Lay the tensors out in the given order, each on a 4 KiB boundary. ValueError: wrong size, header too large."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    body: list[memoryview] = []
    placed: list[tuple[TensorPart, int]] = []
    position = 0
    for index, tensor in enumerate(tensors):
        if tensor.data.nbytes * 8 != math.prod(tensor.shape) * ITEM_BITS[tensor.dtype]:
            raise ValueError(f"tensor {tensor.name}: {tensor.data.nbytes} bytes do not fill shape {tensor.shape}")
        gap = -position % ALIGNMENT
        if gap:
            header[f"pad.{index}"] = _entry("U8", (gap,), position, gap)
            body.append(memoryview(_PAD)[:gap])
            position += gap
        header[tensor.name] = _entry(tensor.dtype, tensor.shape, position, tensor.data.nbytes)
        placed.append((tensor, position))
        body.append(tensor.data.cast("B") if tensor.data.nbytes else memoryview(b""))
        position += tensor.data.nbytes
    text = _JSON.encode(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}")
    front = struct.pack("<Q", len(text)) + text
    entries = {
        tensor.name: TensorEntry(tensor.name, tensor.dtype, tensor.shape, len(front) + offset, tensor.data.nbytes)
        for tensor, offset in placed
    }
    return FileImage((memoryview(front), *body), entries)


def header_bytes(front: bytes, file_bytes: int) -> int:
    """How many bytes from the start hold the length field and the header. SnapshotError when that cannot be."""
    if len(front) < 8:
        raise SnapshotError("file is shorter than a safetensors length field")
    (length,) = struct.unpack_from("<Q", front)
    if length > MAX_HEADER_BYTES:
        raise SnapshotError(f"header of {length} bytes exceeds {MAX_HEADER_BYTES}")
    if 8 + length > file_bytes:
        raise SnapshotError(f"header of {length} bytes does not fit a file of {file_bytes}")
    return int(8 + length)


def parse(front: bytes, file_bytes: int) -> Header:
    """Parse and check the header at the start of `front` (which must hold all of it, see header_bytes).

    Refused with SnapshotError: anything but known dtypes, shapes whose product is the length, offsets that are
    contiguous from 0 to the end of the file, and text metadata.
    """
    if not 0 <= file_bytes <= MAX_FILE_BYTES:
        raise SnapshotError(f"file of {file_bytes} bytes exceeds {MAX_FILE_BYTES}")
    start = header_bytes(front, file_bytes)
    if len(front) < start:
        raise SnapshotError("header is truncated")
    try:
        text = front[8:start].decode("utf-8")
    except UnicodeDecodeError:
        raise SnapshotError("header is not UTF-8") from None
    document = parse_json_object(text, "header")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SnapshotError("header __metadata__ must map text to text")
    if len(document) > MAX_TENSORS:
        raise SnapshotError(f"header names {len(document)} tensors, more than {MAX_TENSORS}")
    entries = sorted(
        (_checked_entry(name, value, start, file_bytes) for name, value in document.items()),
        key=lambda entry: (entry.offset, entry.nbytes),
    )
    position = start
    for entry in entries:
        if entry.offset != position:
            raise SnapshotError(f"tensor {entry.name!r} does not begin where the one before it ends")
        position += entry.nbytes
    if position != file_bytes:
        raise SnapshotError(f"tensors end at byte {position} of {file_bytes}")
    return Header({entry.name: entry for entry in entries}, metadata, start, file_bytes)


def _entry(dtype: str, shape: tuple[int, ...], start: int, nbytes: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + nbytes]}


def _checked_entry(name: str, value: object, data_start: int, file_bytes: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise SnapshotError(f"tensor {name[:64]!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise SnapshotError(f"tensor {name[:64]!r} has an unknown dtype")
    if not _natural_numbers(shape) or len(shape) > MAX_RANK:
        raise SnapshotError(f"tensor {name[:64]!r} has a malformed shape")
    if not _natural_numbers(offsets) or len(offsets) != 2:
        raise SnapshotError(f"tensor {name[:64]!r} has malformed data_offsets")
    begin, end = offsets
    if not begin <= end <= file_bytes - data_start:
        raise SnapshotError(f"tensor {name[:64]!r} lies outside the file")
    if math.prod(shape) * ITEM_BITS[dtype] != (end - begin) * 8:
        raise SnapshotError(f"tensor {name[:64]!r}: its shape does not fit its length")
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, end - begin)


def _natural_numbers(value: object) -> bool:
    """Bounded, so that products of them stay small numbers."""
    if not isinstance(value, list):
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_FILE_BYTES for n in value)
