"""Strict reading of a safetensors header.

A checkpoint may be truncated by a failed download or made by a stranger. Everything about a file is therefore checked
from its first bytes and its size, before any of it is mapped or allocated: the header's length, that each tensor's
bytes agree with its shape, and that the tensors tile the file without holes, overlaps or a tail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_runtime.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

ITEM_SIZES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a shard."""

    key: str
    file: Path
    dtype: str
    """As the format spells it: "F32", "BF16", ..."""
    shape: tuple[int, ...]
    bytes: int
    offset: int = 0
    """Of the first byte, in the file."""


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises CheckpointError naming the file (and the key) when it is damaged."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
            length = int.from_bytes(prefix, "little")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: the header claims {length} bytes, the file has {size} and the limit is {MAX_HEADER_BYTES}"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    entries = _parse(path, raw)
    entries.pop("__metadata__", None)
    spans = []
    found = {}
    for key, entry in entries.items():
        begin, end, info = _tensor(path, key, entry, 8 + length)
        spans.append((begin, end, key))
        found[key] = info
    _check_tiling(path, spans, size - 8 - length)
    return found


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: key {twice!r} appears twice in the header")
        return mapping

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    return parsed


def _tensor(path: Path, key: str, entry: Any, data_start: int) -> tuple[int, int, TensorInfo]:
    """(begin, end, info) of one header entry."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: {key} is not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise CheckpointError(f"{path}: {key} has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or not all(_is_count(dim) for dim in shape):
        raise CheckpointError(f"{path}: {key} has an invalid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{path}: {key} has invalid data_offsets")
    begin, end = offsets
    expected = math.prod(shape) * ITEM_SIZES[dtype]
    if end - begin != expected:
        raise CheckpointError(f"{path}: {key} spans {end - begin} bytes, {dtype}{shape} needs {expected}")
    return begin, end, TensorInfo(key, path, dtype, tuple(shape), expected, data_start + begin)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_tiling(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    position = 0
    for begin, end, key in sorted(spans):
        if begin < position:
            raise CheckpointError(f"{path}: {key} overlaps the tensor before it")
        if begin > position:
            raise CheckpointError(f"{path}: there is a hole of {begin - position} bytes before {key}")
        position = end
    if position != data_bytes:
        what = "truncated" if position > data_bytes else "followed by unknown bytes"
        raise CheckpointError(f"{path}: the file is {what}: its tensors need {position} bytes, it holds {data_bytes}")
