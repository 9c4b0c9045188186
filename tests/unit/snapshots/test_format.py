"""The safetensors reader refuses everything malformed, and real safetensors libraries read what the writer makes."""

from __future__ import annotations

import hashlib
import json
import struct
from contextlib import suppress
from pathlib import Path

import blake3
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.io import digest, files, format, tensors
from engram_runtime.snapshots.policy.identity import Keyring, TokenChain
from engram_runtime.snapshots.policy.manifest import AnchorRef, Manifest
from engram_runtime.snapshots.sources import check_kv_file
from tests.support.snapshots import ABI, DENSE, HYBRID, KEY, Device

RING = Keyring(KEY)


def joined(image: format.FileImage) -> bytes:
    return b"".join(image.parts)


def write(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


PARTS = st.lists(
    st.tuples(st.sampled_from(["U8", "U32", "F32", "BF16", "F8_E4M3"]), st.lists(st.integers(0, 9), max_size=4)),
    max_size=8,
)


@given(PARTS, st.dictionaries(st.text(max_size=10), st.text(max_size=50), max_size=4))
def test_round_trip(shapes: list[tuple[str, list[int]]], metadata: dict[str, str]) -> None:
    parts = []
    for number, (dtype, shape) in enumerate(shapes):
        count = 1
        for size in shape:
            count *= size
        data = memoryview(bytes([number + 1]) * (count * format.ITEM_BITS[dtype] // 8))
        parts.append(format.TensorPart(f"t{number}", dtype, tuple(shape), data))
    data = joined(format.build(parts, metadata))
    header = format.parse(data, len(data))
    assert dict(header.metadata) == metadata
    for part in parts:
        found = header.tensors[part.name]
        assert (found.dtype, found.shape, found.nbytes) == (part.dtype, part.shape, part.data.nbytes)
        assert data[found.offset : found.offset + found.nbytes] == bytes(part.data)
        assert found.offset % format.ALIGNMENT == 0
    reference = {name: tuple(found["shape"]) for name, found in safetensors.deserialize(data)}
    assert reference == {name: found.shape for name, found in header.tensors.items()}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        write({}, length=2**63),
        write({}, length=format.MAX_HEADER_BYTES + 1),
        write({}, length=100),
        write(b"\xff\xfe"),
        write(b"[]"),
        write(b"{"),
        write(b'{"a":1,"a":2}'),
        write({"__metadata__": {"a": 1}}),
        write({"__metadata__": []}),
        write({"t": entry()}),  # data is missing
        write({"t": entry()}, b"12345"),  # too much data
        write({"t": entry(offsets=(1, 5))}, b"12345"),  # a hole
        write({"t": entry(), "u": entry(offsets=(2, 6))}, b"123456"),  # overlap
        write({"t": entry(offsets=(4, 0))}, b"1234"),
        write({"t": entry(offsets=(-4, 0))}, b"1234"),
        write({"t": entry(offsets=(0, 4, 4))}, b"1234"),
        write({"t": entry(offsets=(0.0, 4.0))}, b"1234"),
        write({"t": entry(offsets=(False, 4))}, b"1234"),
        write({"t": entry(shape=(5,))}, b"1234"),
        write({"t": entry(shape=(-4,))}, b"1234"),
        write({"t": entry(shape=(2**62, 4, 2**62))}, b"1234"),
        write({"t": entry(shape=(10**4000,))}, b"1234"),
        write({"t": entry(shape=[1] * 9)}, b"1"),
        write({"t": entry(shape="4")}, b"1234"),
        write({"t": entry(dtype="F128")}, b"1234"),
        write({"t": entry(dtype=3)}, b"1234"),
        write({"t": {**entry(), "more": 1}}, b"1234"),
        write({"t": None}, b"1234"),
        write({f"t{n}": entry(offsets=(0, 0), shape=(0,)) for n in range(format.MAX_TENSORS + 1)}),
        write(b"[" * 90_000),
    ],
)
def test_malformed_headers_are_refused(data: bytes) -> None:
    with pytest.raises(SnapshotError):
        format.parse(data, len(data))


def test_a_huge_claim_allocates_nothing() -> None:
    """Shapes are compared with the length before anybody allocates, and lengths with the file."""
    data = write({"t": entry(shape=(2**40,), offsets=(0, 2**40))}, b"")
    with pytest.raises(SnapshotError, match="outside the file"):
        format.parse(data, len(data))
    with pytest.raises(SnapshotError, match="exceeds"):
        format.parse(data, 2**41)


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    with suppress(SnapshotError):
        format.parse(data, len(data))


@given(st.data())
def test_mutated_headers(data: st.DataObject) -> None:
    """One changed byte of a valid file: a SnapshotError, or a header whose every tensor lies inside the file."""
    good = joined(
        format.build(
            [
                format.TensorPart("a", "F32", (2, 2), memoryview(bytes(16))),
                format.TensorPart("b", "U8", (3,), memoryview(b"abc")),
            ],
            {"k": "v"},
        )
    )
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, 300))] = data.draw(st.integers(0, 255))
    try:
        header = format.parse(bytes(changed), len(changed))
    except SnapshotError:
        return
    for found in header.tensors.values():
        assert header.data_start <= found.offset <= found.offset + found.nbytes <= len(changed)


def make_files(layout: object = HYBRID) -> tuple[files.KVFile, format.FileImage, Device, TokenChain]:
    device = Device(HYBRID)
    chain = TokenChain(RING.root(ABI, "t"), range(100))
    kv = files.build_kv_file(
        chain, HYBRID, [(0, 30, device.read_kv(range(7), 0, 30)), (30, 100, device.read_kv(range(7), 30, 70))]
    )
    content = files.describe_snapshot(chain, 100, b'{"a":1}', device.read_state(3), HYBRID)
    manifest = Manifest(
        "0" * 32, None, ABI, "c", "main", 1, "turn_end", 100, (5,), chain.key(100), kv.refs, content.refs,
        (AnchorRef(100, chain.anchor(100)),), "", "", 1.5,
    )  # fmt: skip
    return kv, files.build_snapshot_file(manifest, content, RING.signer("n" * 32)), device, chain


def test_safetensors_reads_our_files(tmp_path: Path) -> None:
    kv, snapshot, device, _ = make_files()
    (tmp_path / "kv").write_bytes(joined(kv.image))
    (tmp_path / "snap").write_bytes(joined(snapshot))
    loaded = safetensors.torch.load_file(tmp_path / "kv")
    assert torch.equal(loaded["kv.0"], device.read_kv(range(7), 0, 30))
    assert torch.equal(loaded["kv.1"], device.read_kv(range(7), 30, 70))
    assert loaded["token_ids.1"].tolist() == list(range(30, 100))
    with safetensors.safe_open(tmp_path / "snap", framework="pt") as opened:
        assert opened.metadata()["format"] == files.SNAPSHOT_FORMAT
        assert json.loads(opened.metadata()[files.MANIFEST_KEY])["forwarded"] == 100
        state = device.read_state(3)
        assert torch.equal(opened.get_tensor("ssm"), state["ssm"])
        assert torch.equal(opened.get_slice("conv")[:], state["conv"])
        assert opened.get_tensor("token_ids").tolist() == list(range(100))
        assert bytes(opened.get_tensor("messages").tolist()) == b'{"a":1}'


def test_kv_files_certify_themselves() -> None:
    kv, _, _, _ = make_files()
    data = joined(kv.image)
    assert check_kv_file(data, kv.name) == list(kv.refs)
    with pytest.raises(SnapshotError, match="name"):
        check_kv_file(data, "0" * 64)
    changed = bytearray(data)
    changed[kv.refs[1].offset + 5] ^= 1
    with pytest.raises(SnapshotError, match="checksum"):
        check_kv_file(bytes(changed), kv.name)
    with pytest.raises(SnapshotError):
        check_kv_file(data[:-1], kv.name)


def test_wrong_tensors_are_not_written() -> None:
    device = Device(HYBRID)
    chain = TokenChain(b"r", range(40))
    with pytest.raises(ValueError, match="kv must be"):
        files.build_kv_file(chain, HYBRID, [(0, 30, device.read_kv(range(7), 0, 29))])
    with pytest.raises(ValueError, match="kv must be"):
        files.build_kv_file(chain, DENSE, [(0, 30, device.read_kv(range(7), 0, 30))])
    with pytest.raises(ValueError, match="state must hold"):
        files.describe_snapshot(chain, 40, None, {}, HYBRID)
    state = device.read_state(0)
    with pytest.raises(ValueError, match="ssm must be"):
        files.describe_snapshot(chain, 40, None, {**state, "ssm": state["ssm"].to(torch.bfloat16)}, HYBRID)
    with pytest.raises(ValueError, match="contiguous"):
        tensors.view_bytes(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="do not fill"):
        format.build([format.TensorPart("a", "F32", (3,), memoryview(bytes(8)))], {})
    with pytest.raises(ValueError, match="header"):
        format.build([], {"k": "v" * format.MAX_HEADER_BYTES})


@given(st.binary(max_size=100))
def test_digests(data: bytes) -> None:
    value = digest.digest(memoryview(data))
    digest.check(memoryview(data), value, "x")
    with pytest.raises(SnapshotError, match="damaged"):
        digest.check(memoryview(data + b"!"), value, "x")
    with pytest.raises(SnapshotError, match="not installed"):
        digest.check(memoryview(data), "md5:" + "0" * 32, "x")


def test_without_blake3_large_tensors_are_hashed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(digest._ALGORITHMS, "blake3")
    for size in (0, 5, 1 << 20, (1 << 20) + 1, (5 << 20) + 77):
        data = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
        data = data[:size]
        value = digest.digest(memoryview(data))
        if size <= 1 << 20:
            assert value == f"sha256:{hashlib.sha256(data).hexdigest()}"
        else:
            leaves = [hashlib.sha256(data[at : at + (1 << 20)]).digest() for at in range(0, size, 1 << 20)]
            assert value == f"sha256-1m:{hashlib.sha256(b''.join(leaves)).hexdigest()}"
        digest.check(memoryview(data), value, "x")
        with pytest.raises(SnapshotError, match="damaged"):
            digest.check(memoryview(data + b"!"), value, "x")


def test_large_digests_agree_with_small_ones() -> None:
    data = bytes(range(256)) * 8192
    assert digest.digest(memoryview(data)) == f"blake3:{blake3.blake3(data).hexdigest()}"
