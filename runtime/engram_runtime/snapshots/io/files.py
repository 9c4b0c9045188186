"""The two kinds of file: KV pieces, and a snapshot (states, token ids, manifest). See docs/snapshot-format.md.

A KV file is named by the hash of its own table of pieces: their chain keys, which are rooted in the tenant, and the
digests of their bytes. So two writers can only mean the same bytes by one name, and anyone can check a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.io import digest, format, tensors
from engram_runtime.snapshots.policy import manifest as manifests
from engram_runtime.snapshots.policy.identity import Signer, TokenChain, canonical_json, token_bytes
from engram_runtime.snapshots.policy.manifest import START, Manifest, PieceRef, TensorRef
from engram_runtime.snapshots.types import StateLayout

KV_FORMAT = "engram-kv-1"
SNAPSHOT_FORMAT = "engram-snapshot-1"
PIECES_KEY = "engram.pieces"
MANIFEST_KEY = "engram.manifest"
HMAC_KEY = "engram.hmac"
FRONT_BYTES = 64 * 1024  # one request brings the header and, nearly always, all token ids


@dataclass(frozen=True, slots=True)
class KVFile:
    """New pieces of one turn. `packed[i]` [L, 2, K, n_i, D] belongs to `refs[i]`; the image shares their memory."""

    name: str
    refs: tuple[PieceRef, ...]
    packed: tuple[Tensor, ...]
    image: format.FileImage


@dataclass(frozen=True, slots=True)
class SnapshotParts:
    """What a snapshot file holds beside its manifest."""

    parts: tuple[format.TensorPart, ...]
    refs: tuple[TensorRef, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A snapshot file whose header and manifest were read and checked; its tensors were not read yet."""

    key: str
    manifest: Manifest
    header: format.Header
    front: bytes


def build_kv_file(chain: TokenChain, layout: StateLayout, pieces: Sequence[tuple[int, int, Tensor]]) -> KVFile:
    """`pieces`: (start, end, packed [L, 2, K, end - start, D]) in ascending order. ValueError on a wrong shape."""
    parts: list[format.TensorPart] = []
    table: list[list[object]] = []
    for index, (start, end, packed) in enumerate(pieces):
        shape = tensors.kv_shape(layout, end - start)
        tensors.check_tensor("kv", packed, shape, layout.kv_dtype)
        data = tensors.view_bytes(packed)
        parts.append(format.TensorPart(f"kv.{index}", tensors.FILE_DTYPES[layout.kv_dtype], shape, data))
        table.append([f"kv.{index}", start, end, chain.key(end), digest.digest(data)])
    for index, (start, end, _) in enumerate(pieces):
        ids = token_bytes(chain.tokens[start:end])
        parts.append(format.TensorPart(f"token_ids.{index}", "U32", (end - start,), memoryview(ids)))
    text = canonical_json(table)
    name = kv_name(text.decode())
    image = format.build(parts, {"format": KV_FORMAT, PIECES_KEY: text.decode()})
    refs = []
    for index, (start, end, _) in enumerate(pieces):
        entry = image.tensors[f"kv.{index}"]
        refs.append(
            PieceRef(
                name, entry.name, start, end, end, chain.key(end), entry.offset, entry.nbytes, str(table[index][4])
            )
        )
    return KVFile(name, tuple(refs), tuple(packed for _, _, packed in pieces), image)


def kv_name(pieces_text: str) -> str:
    return hashlib.sha256(b"engram-kv\0" + pieces_text.encode("utf-8", "replace")).hexdigest()


def describe_snapshot(
    chain: TokenChain,
    forwarded: int,
    messages: bytes | None,
    states: Mapping[str, Tensor],
    layout: StateLayout,
    start: Mapping[str, Tensor] | None = None,
) -> SnapshotParts:
    """Tensors of a snapshot file, token ids first. `start`: the state at user_start. ValueError when `states` are not
    what the layout says."""
    parts = [format.TensorPart("token_ids", "U32", (forwarded,), memoryview(token_bytes(chain.tokens[:forwarded])))]
    if messages:
        parts.append(format.TensorPart("messages", "U8", (len(messages),), memoryview(messages)))
    for prefix, state in (("", states), (START, start)):
        if state is None:
            continue
        if state.keys() != layout.states.keys():
            raise ValueError(f"state must hold {sorted(layout.states)}, got {sorted(state)}")
        for name, spec in layout.states.items():
            tensors.check_tensor(name, state[name], spec.shape, spec.dtype)
            data = tensors.view_bytes(state[name])
            parts.append(format.TensorPart(prefix + name, tensors.FILE_DTYPES[spec.dtype], spec.shape, data))
    refs = tuple(TensorRef(part.name, part.data.nbytes, digest.digest(part.data)) for part in parts)
    return SnapshotParts(tuple(parts), refs)


def build_snapshot_file(manifest: Manifest, content: SnapshotParts, signer: Signer) -> format.FileImage:
    if manifest.tensors != content.refs:
        raise ValueError("manifest must describe the tensors of the file")
    text, signature = manifests.sign(manifest, signer)
    return format.build(content.parts, {"format": SNAPSHOT_FORMAT, MANIFEST_KEY: text, HMAC_KEY: signature})


def open_snapshot(key: str, front: bytes, size: int, signer: Signer, *, verify: bool) -> OpenSnapshot:
    """Check header, signature and manifest of a snapshot file of which `front` holds at least the header."""
    header = format.parse(front, size)
    if header.metadata.get("format") != SNAPSHOT_FORMAT:
        raise SnapshotError(f"format is not {SNAPSHOT_FORMAT}")
    text, signature = header.metadata.get(MANIFEST_KEY, ""), header.metadata.get(HMAC_KEY, "")
    manifest = manifests.decode(text, signature, signer, verify=verify)
    for ref in manifest.tensors:
        entry = header.tensors.get(ref.name)
        if entry is None or entry.nbytes != ref.nbytes:
            raise SnapshotError(f"tensor {ref.name} is missing or has another length than its manifest says")
    ids = header.tensors["token_ids"]
    if ids.dtype != "U32" or ids.shape != (manifest.forwarded,):
        raise SnapshotError("token_ids must be a U32 vector of the forwarded tokens")
    return OpenSnapshot(key, manifest, header, front)


def check_state_entries(opened: OpenSnapshot, layout: StateLayout, prefix: str = "") -> None:
    """SnapshotError unless the file holds exactly the states of this model, before anything is allocated."""
    for bare, spec in layout.states.items():
        name = prefix + bare
        entry = opened.header.tensors.get(name)
        expected = (tensors.FILE_DTYPES[spec.dtype], spec.shape)
        if opened.manifest.tensor(name) is None or entry is None or (entry.dtype, entry.shape) != expected:
            raise SnapshotError(f"state {name} is missing or is not {list(spec.shape)} {spec.dtype}")
