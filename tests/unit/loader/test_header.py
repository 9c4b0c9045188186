"""A damaged or hostile safetensors header is an error that names the file and the key, before anything is mapped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engram_runtime.errors import CheckpointError
from engram_runtime.loader.header import MAX_HEADER_BYTES, read_header

GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
}


def write(path: Path, header: object, data: int = 22, *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data))
    return path


def changed(key: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, key: {**GOOD[key], **fields}}


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"x": torch.ones(2, 3), "y": torch.ones(4, dtype=torch.bfloat16), "empty": torch.ones(0, 5)}
    save_file(tensors, path, metadata={"format": "pt"})
    found = read_header(path)
    assert {key: (info.dtype, info.shape, info.bytes) for key, info in found.items()} == {
        "x": ("F32", (2, 3), 24),
        "y": ("BF16", (4,), 8),
        "empty": ("F32", (0, 5), 0),
    }


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (GOOD, 21, "truncated: its tensors need 22 bytes, it holds 21"),
        (GOOD, 0, "truncated"),
        (GOOD, 23, "followed by unknown bytes"),
        (changed("b", data_offsets=[15, 21]), 22, "b overlaps"),
        (changed("b", data_offsets=[18, 24]), 24, "hole of 2 bytes before b"),
        (changed("a", shape=[2, 3]), 22, "a spans 16 bytes"),
        (changed("a", shape=[2, -2]), 22, "a has an invalid shape"),
        (changed("a", shape=[2, 2.0]), 22, "a has an invalid shape"),
        (changed("a", shape=[True, 4]), 22, "a has an invalid shape"),
        (changed("a", shape=None), 22, "a has an invalid shape"),
        (changed("a", shape=[2**62, 2**62]), 22, "a spans 16 bytes"),
        (changed("a", data_offsets=[0]), 22, "a has invalid data_offsets"),
        (changed("a", data_offsets=[-16, 0]), 22, "a has invalid data_offsets"),
        (changed("a", data_offsets=[16, 0]), 22, "a spans -16 bytes"),
        (changed("a", data_offsets=[0, 2**64]), 22, "a spans"),
        (changed("a", dtype="F31"), 22, "a has the unknown dtype 'F31'"),
        (changed("a", dtype=None), 22, "a has the unknown dtype"),
        ({**GOOD, "a": []}, 22, "a is not a JSON object"),
        ([], 0, "header is not a JSON object"),
        (b"{", 22, "not valid JSON"),
        (b"\xff\xfe", 22, "not valid JSON"),
        (b"[" * 100_000, 22, "not valid JSON"),
        (b'{"a": 1, "a": 2}', 22, "'a' appears twice"),
    ],
)
def test_damage_is_named(tmp_path: Path, header: object, data: int, message: str) -> None:
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [23 + 200, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", GOOD, length=length)
    with pytest.raises(CheckpointError, match=f"the header claims {length} bytes"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_a_length_is_named(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match="too few"):
        read_header(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: cannot be read"):
        read_header(tmp_path / "gone.safetensors")


RAW = json.dumps(GOOD).encode()


@given(edits=st.lists(st.tuples(st.integers(0, len(RAW) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_random_damage_is_refused_or_harmless(
    edits: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any bytes: either a CheckpointError, or tensors that tile the file exactly."""
    raw = bytearray(RAW)
    for position, value in edits:
        raw[position] = value
    path = write(tmp_path_factory.mktemp("header") / "model.safetensors", bytes(raw))
    try:
        found = read_header(path)
    except CheckpointError:
        return
    assert sum(info.bytes for info in found.values()) == 22
