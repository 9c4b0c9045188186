"""Three small signed documents beside manifests and refs: anchors, labels and tombstones."""

from __future__ import annotations

from dataclasses import dataclass

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.policy import ids
from engram_runtime.snapshots.policy.identity import Signer
from engram_runtime.snapshots.policy.manifest import MAX_TOKENS, parse_json_object
from engram_runtime.snapshots.policy.refs import open_signed, seal

MAX_RECORD_BYTES = 64 * 1024
MAX_TOMBSTONE_IDS = 1000
NEVER = 253402300799.0  # the year 9999: a label that lifts the expiry of its manifest


@dataclass(frozen=True, slots=True)
class Anchor:
    """Says which snapshot holds the tokens that the anchor's name stands for."""

    snapshot_id: str
    position: int


@dataclass(frozen=True, slots=True)
class Label:
    """What was decided after the save; None keeps what the manifest says."""

    pinned: bool | None = None
    tag: str | None = None
    expires: float | None = None


def effective_expiry(manifest_expires: float | None, label: Label | None) -> float | None:
    """Unix seconds; None for never."""
    expires = manifest_expires if label is None or label.expires is None else label.expires
    return None if expires is None or expires >= NEVER else expires


def encode_anchor(anchor: Anchor, name: str, signer: Signer) -> bytes:
    """The name is signed along: an anchor copied to another name is refused."""
    return seal("anchor", f"anchor-{name}", {"snapshot": anchor.snapshot_id, "position": anchor.position}, signer)


def decode_anchor(data: bytes, name: str, signer: Signer, *, verify: bool = True) -> Anchor:
    document = _open(data, "anchor", f"anchor-{name}", signer, verify)
    snapshot_id, position = document.get("snapshot"), document.get("position")
    if not isinstance(snapshot_id, str) or not ids.is_id(snapshot_id):
        raise SnapshotError("anchor snapshot is malformed")
    if isinstance(position, bool) or not isinstance(position, int) or not 0 < position <= MAX_TOKENS:
        raise SnapshotError("anchor position is malformed")
    return Anchor(snapshot_id, position)


def encode_label(label: Label, snapshot_id: str, signer: Signer) -> bytes:
    body = {"pinned": label.pinned, "tag": label.tag, "expires": label.expires}
    return seal("label", f"label-{snapshot_id}", body, signer)


def decode_label(data: bytes, snapshot_id: str, signer: Signer, *, verify: bool = True) -> Label:
    document = _open(data, "label", f"label-{snapshot_id}", signer, verify)
    pinned, tag, expires = document.get("pinned"), document.get("tag"), document.get("expires")
    if pinned is not None and not isinstance(pinned, bool):
        raise SnapshotError("label pinned is malformed")
    if expires is not None and (isinstance(expires, bool) or not isinstance(expires, (int, float))):
        raise SnapshotError("label expires is malformed")
    if tag is not None:
        try:
            tag = ids.check_tag(tag if isinstance(tag, str) else "")
        except ValueError as error:
            raise SnapshotError(f"label tag: {error}") from None
    return Label(pinned, tag, None if expires is None else float(expires))


def encode_tombstone(snapshot_ids: list[str], event_id: str, signer: Signer) -> bytes:
    """At most MAX_TOMBSTONE_IDS ids."""
    return seal("gone", f"gone-{event_id}", {"ids": snapshot_ids}, signer)


def decode_tombstone(data: bytes, event_id: str, signer: Signer, *, verify: bool = True) -> list[str]:
    listed = _open(data, "gone", f"gone-{event_id}", signer, verify).get("ids")
    if not isinstance(listed, list) or len(listed) > MAX_TOMBSTONE_IDS:
        raise SnapshotError("tombstone ids are malformed")
    result = [item for item in listed if isinstance(item, str) and ids.is_id(item)]
    if len(result) != len(listed):
        raise SnapshotError("tombstone ids are malformed")
    return result


def _open(data: bytes, field: str, purpose: str, signer: Signer, verify: bool) -> dict[str, object]:
    return parse_json_object(
        open_signed(data, field, purpose, signer, limit=MAX_RECORD_BYTES, verify=verify),
        field,
    )
