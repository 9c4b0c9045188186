"""The manifest: what one snapshot is, in a form that can be signed, and read back from a stranger without harm.

Nothing in it is believed before the HMAC over its exact bytes agrees, and even then every field is checked against hard
limits before anything is allocated: with checks switched off (tamper tests) a manifest can still at worst be refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.policy import ids
from engram_runtime.snapshots.policy.boundaries import check_boundary
from engram_runtime.snapshots.policy.identity import FORMAT_VERSION, Signer, canonical_json

MAX_MANIFEST_BYTES = 64 * 1024
MAX_PIECES = 32
MAX_TOKENS = 1 << 24
MAX_PENDING = 64
MAX_TENSORS = 16
MAX_TENSOR_BYTES = 1 << 40
MAX_ANCHORS = 4
PURPOSE = "manifest"
START = "start."
"""Begins the names of state tensors that are exact at the first anchor (user_start) instead of at `forwarded`."""
_HEX64 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"(blake3|sha256|sha256-1m):[0-9a-f]{64}")
_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")


@dataclass(frozen=True, slots=True)
class PieceRef:
    """KV of tokens [start, end): the front part of a tensor [L, 2, K, tensor_end - start, D] in a KV file.

    `end` < `tensor_end` where a branch left the piece half-way. `chain` is the chain key at `tensor_end`; offset and
    nbytes (absolute, in the file) allow one ranged read; the digest is over the whole tensor.
    """

    file: str
    tensor: str
    start: int
    end: int
    tensor_end: int
    chain: str
    offset: int
    nbytes: int
    digest: str

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of the snapshot file itself: token_ids, messages, or a state."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class AnchorRef:
    position: int
    name: str


@dataclass(frozen=True, slots=True)
class Manifest:
    snapshot_id: str
    parent_id: str | None
    state_abi: str
    conversation_id: str
    branch_name: str
    turn_number: int
    boundary: str
    forwarded: int
    pending_ids: tuple[int, ...]
    chain: str  # chain key at `forwarded`
    pieces: tuple[PieceRef, ...]
    tensors: tuple[TensorRef, ...]
    anchors: tuple[AnchorRef, ...]
    tokenizer_digest: str
    template_digest: str
    created: float
    expires: float | None = None
    pinned: bool = False
    tag: str | None = None

    @property
    def start_position(self) -> int | None:
        """Where the second state lies, if there is one: at user_start."""
        has_start = any(tensor.name.startswith(START) for tensor in self.tensors)
        return min(anchor.position for anchor in self.anchors) if has_start and self.anchors else None

    @property
    def kv_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return self.kv_bytes + sum(tensor.nbytes for tensor in self.tensors)

    def files(self) -> frozenset[str]:
        """Names of the KV files it needs."""
        return frozenset(piece.file for piece in self.pieces)

    def tensor(self, name: str) -> TensorRef | None:
        return next((t for t in self.tensors if t.name == name), None)

    def on_branch(self, branch_name: str) -> Manifest:
        return replace(self, branch_name=branch_name)


def encode(manifest: Manifest) -> bytes:
    """Canonical bytes: what is signed and stored."""
    return canonical_json(
        {
            "format": FORMAT_VERSION,
            "id": manifest.snapshot_id,
            "parent": manifest.parent_id,
            "state_abi": manifest.state_abi,
            "conversation": manifest.conversation_id,
            "branch": manifest.branch_name,
            "turn": manifest.turn_number,
            "boundary": manifest.boundary,
            "forwarded": manifest.forwarded,
            "pending": list(manifest.pending_ids),
            "chain": manifest.chain,
            "pieces": [
                [p.file, p.tensor, p.start, p.end, p.tensor_end, p.chain, p.offset, p.nbytes, p.digest]
                for p in manifest.pieces
            ],
            "tensors": [[t.name, t.nbytes, t.digest] for t in manifest.tensors],
            "anchors": [[a.position, a.name] for a in manifest.anchors],
            "tokenizer": manifest.tokenizer_digest,
            "template": manifest.template_digest,
            "created": manifest.created,
            "expires": manifest.expires,
            "pinned": manifest.pinned,
            "tag": manifest.tag,
        }
    )


def sign(manifest: Manifest, signer: Signer) -> tuple[str, str]:
    """(manifest text, HMAC hex)."""
    data = encode(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise SnapshotError(f"manifest of {len(data)} bytes exceeds {MAX_MANIFEST_BYTES}")
    return data.decode(), signer.sign(PURPOSE, data)


def decode(text: str, signature: str, signer: Signer, *, verify: bool = True) -> Manifest:
    """Check the signature, then every field. SnapshotError says what is wrong; nothing else is ever raised."""
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_MANIFEST_BYTES:
        raise SnapshotError(f"manifest of {len(data)} bytes exceeds {MAX_MANIFEST_BYTES}")
    if verify and not signer.verify(PURPOSE, data, signature):
        raise SnapshotError("manifest signature does not match: forged, damaged, or of another tenant")
    return _Reader(parse_json_object(text, "manifest")).manifest()


def parse_json_object(text: str, what: str) -> dict[str, object]:
    """A JSON object without duplicate keys, NaN or infinities. SnapshotError otherwise."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise SnapshotError(f"{what} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


class _Reader:
    """Takes typed fields out of an untrusted document; every complaint names the field."""

    def __init__(self, document: dict[str, object]) -> None:
        self.document = document

    def manifest(self) -> Manifest:
        if self.document.keys() != _FIELDS:
            raise SnapshotError(f"manifest fields differ: {sorted(self.document.keys() ^ _FIELDS)[:5]}")
        if self.integer("format", 0, 1 << 30) != FORMAT_VERSION:
            raise SnapshotError(f"manifest format {self.document['format']} is not {FORMAT_VERSION}")
        forwarded = self.integer("forwarded", 1, MAX_TOKENS)
        manifest = Manifest(
            snapshot_id=self.matching("id", ids.check_snapshot_id),
            parent_id=None if self.document["parent"] is None else self.matching("parent", ids.check_snapshot_id),
            state_abi=self.pattern("state_abi", _HEX64),
            conversation_id=self.matching("conversation", ids.check_conversation_id),
            branch_name=self.matching("branch", ids.check_branch_name),
            turn_number=self.integer("turn", 0, 1 << 31),
            boundary=self.matching("boundary", check_boundary),
            forwarded=forwarded,
            pending_ids=tuple(_int("pending", n, 0, (1 << 32) - 1) for n in self.items("pending", MAX_PENDING)),
            chain=self.pattern("chain", _HEX64),
            pieces=tuple(_piece(row) for row in self.items("pieces", MAX_PIECES)),
            tensors=tuple(_tensor(row) for row in self.items("tensors", MAX_TENSORS)),
            anchors=tuple(_anchor(row, forwarded) for row in self.items("anchors", MAX_ANCHORS)),
            tokenizer_digest=self.text("tokenizer", 256),
            template_digest=self.text("template", 256),
            created=self.time("created"),
            expires=None if self.document["expires"] is None else self.time("expires"),
            pinned=self.boolean("pinned"),
            tag=None if self.document["tag"] is None else self.matching("tag", ids.check_tag),
        )
        _check_coverage(manifest)
        return manifest

    def integer(self, field: str, low: int, high: int) -> int:
        return _int(field, self.document[field], low, high)

    def text(self, field: str, limit: int) -> str:
        value = self.document[field]
        if not isinstance(value, str) or len(value) > limit:
            raise SnapshotError(f"manifest {field} must be text of at most {limit} characters")
        return value

    def pattern(self, field: str, pattern: re.Pattern[str]) -> str:
        return _pattern(field, self.document[field], pattern)

    def matching(self, field: str, check: Callable[[str], str]) -> str:
        try:
            return check(self.text(field, 1024))
        except ValueError as error:
            raise SnapshotError(f"manifest {field}: {error}") from None

    def items(self, field: str, limit: int) -> list[object]:
        value = self.document[field]
        if not isinstance(value, list) or len(value) > limit:
            raise SnapshotError(f"manifest {field} must be a list of at most {limit}")
        return value

    def time(self, field: str) -> float:
        value = self.document[field]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
            raise SnapshotError(f"manifest {field} must be Unix seconds")
        if not math.isfinite(value):
            raise SnapshotError(f"manifest {field} must be finite")
        return float(value)

    def boolean(self, field: str) -> bool:
        value = self.document[field]
        if not isinstance(value, bool):
            raise SnapshotError(f"manifest {field} must be true or false")
        return value


_FIELDS = frozenset(
    {"format", "id", "parent", "state_abi", "conversation", "branch", "turn", "boundary", "forwarded", "pending"}
    | {"chain", "pieces", "tensors", "anchors", "tokenizer", "template", "created", "expires", "pinned", "tag"}
)


def _int(field: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SnapshotError(f"manifest {field} must be an integer in [{low}, {high}]")
    return value


def _pattern(field: str, value: object, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise SnapshotError(f"manifest {field} is malformed")
    return value


def _row(field: str, row: object, length: int) -> list[object]:
    if not isinstance(row, list) or len(row) != length:
        raise SnapshotError(f"manifest {field} entries must have {length} items")
    return row


def _piece(row: object) -> PieceRef:
    file, tensor, start, end, tensor_end, chain, offset, nbytes, digest = _row("pieces", row, 9)
    piece = PieceRef(
        file=_pattern("pieces.file", file, _HEX64),
        tensor=_pattern("pieces.tensor", tensor, _NAME),
        start=_int("pieces.start", start, 0, MAX_TOKENS),
        end=_int("pieces.end", end, 1, MAX_TOKENS),
        tensor_end=_int("pieces.tensor_end", tensor_end, 1, MAX_TOKENS),
        chain=_pattern("pieces.chain", chain, _HEX64),
        offset=_int("pieces.offset", offset, 8, MAX_TENSOR_BYTES),
        nbytes=_int("pieces.nbytes", nbytes, 1, MAX_TENSOR_BYTES),
        digest=_pattern("pieces.digest", digest, _DIGEST),
    )
    if not piece.start < piece.end <= piece.tensor_end:
        raise SnapshotError("manifest pieces must have start < end <= tensor_end")
    return piece


def _tensor(row: object) -> TensorRef:
    name, nbytes, digest = _row("tensors", row, 3)
    return TensorRef(
        _pattern("tensors.name", name, _NAME),
        _int("tensors.nbytes", nbytes, 0, MAX_TENSOR_BYTES),
        _pattern("tensors.digest", digest, _DIGEST),
    )


def _anchor(row: object, forwarded: int) -> AnchorRef:
    position, name = _row("anchors", row, 2)
    return AnchorRef(_int("anchors.position", position, 1, forwarded), _pattern("anchors.name", name, _HEX64))


def _check_coverage(manifest: Manifest) -> None:
    """Pieces are gapless from 0 to `forwarded` (or absent: a pure-state model); token ids are there, in full."""
    position = 0
    for piece in manifest.pieces:
        if piece.start != position:
            raise SnapshotError(f"manifest pieces leave a gap at token {position}")
        position = piece.end
    if manifest.pieces and position != manifest.forwarded:
        raise SnapshotError(f"manifest pieces end at {position}, not at {manifest.forwarded}")
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) != len(names):
        raise SnapshotError("manifest tensors repeat a name")
    tokens = manifest.tensor("token_ids")
    if tokens is None or tokens.nbytes != 4 * manifest.forwarded:
        raise SnapshotError("manifest token_ids do not cover the forwarded tokens")
