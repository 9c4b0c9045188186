"""Branch heads: the only mutable records, moved by compare-and-swap.

A ref also lists the branch's snapshots (newest last, bounded), so that a conversation can be listed and a turn resolved
without reading a manifest. The rule for moving a head is pure: `may_advance`. A writer that may not, or that loses the
swap to such a head, opens a branch of its own; nothing is ever overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.policy import ids
from engram_runtime.snapshots.policy.boundaries import check_boundary, rank
from engram_runtime.snapshots.policy.identity import Signer, canonical_json
from engram_runtime.snapshots.policy.manifest import MAX_TOKENS, Manifest, parse_json_object

MAX_ENTRIES = 256
MAX_REF_BYTES = 256 * 1024
PURPOSE = "ref"
_HEX64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RefEntry:
    snapshot_id: str
    parent_id: str | None
    turn_number: int
    boundary: str
    forwarded: int
    chain: str

    @classmethod
    def of(cls, manifest: Manifest) -> RefEntry:
        return cls(
            manifest.snapshot_id,
            manifest.parent_id,
            manifest.turn_number,
            manifest.boundary,
            manifest.forwarded,
            manifest.chain,
        )


@dataclass(frozen=True, slots=True)
class Ref:
    conversation_id: str
    branch_name: str
    head: str
    generation: int  # counts moves, so that going back to an old head is not an old record
    entries: tuple[RefEntry, ...]

    def entry(self, snapshot_id: str) -> RefEntry | None:
        return next((e for e in self.entries if e.snapshot_id == snapshot_id), None)

    @property
    def head_entry(self) -> RefEntry:
        entry = self.entry(self.head)
        if entry is None:
            raise SnapshotError("ref head is not among its entries")
        return entry

    def advance(self, entry: RefEntry) -> Ref:
        """The ref with `entry` as its head."""
        kept = tuple(e for e in self.entries if e.snapshot_id != entry.snapshot_id)
        return replace(self, head=entry.snapshot_id, generation=self.generation + 1, entries=_bounded((*kept, entry)))

    def listing(self, entry: RefEntry) -> Ref:
        """The ref with `entry` listed and its head where it was: a turn that was stored after the one it led to."""
        others = tuple(e for e in self.entries if e.snapshot_id not in (entry.snapshot_id, self.head))
        kept = _bounded((*others, entry, self.head_entry))
        return replace(self, generation=self.generation + 1, entries=kept)

    def led_on(self, snapshot_id: str) -> bool:
        """Does this branch list a continuation of the snapshot already?"""
        return any(e.parent_id == snapshot_id for e in self.entries)

    def without(self, gone: frozenset[str]) -> Ref | None:
        """The ref after deletions: a lost head falls back to the newest entry; None when no entry is left."""
        kept = tuple(e for e in self.entries if e.snapshot_id not in gone)
        if not kept:
            return None
        head = self.head if self.head not in gone else kept[-1].snapshot_id
        return replace(self, head=head, generation=self.generation + 1, entries=kept)


def new_ref(manifest: Manifest) -> Ref:
    entry = RefEntry.of(manifest)
    return Ref(manifest.conversation_id, manifest.branch_name, entry.snapshot_id, 1, (entry,))


def may_advance(ref: Ref, manifest: Manifest, chain_key: Callable[[int], str], own: Collection[str] = ()) -> bool:
    """May `manifest` become the head of `ref`?

    Yes when it is the head already (a retry), when the head is its parent, when its tokens continue the head's (by
    chain), or when the head is an earlier boundary that this process wrote in the same turn or in the parent's turn
    (`own`): a template that strips thinking makes siblings of one turn's boundaries. Anything else is somebody else's
    turn. `chain_key(n)` is the new snapshot's chain at n <= forwarded.
    """
    head = ref.head_entry
    if head.snapshot_id in (manifest.snapshot_id, manifest.parent_id):
        return True
    if head.forwarded <= manifest.forwarded and chain_key(head.forwarded) == head.chain:
        return True
    earlier = (head.turn_number, rank(head.boundary)) < (manifest.turn_number, rank(manifest.boundary))
    return earlier and head.snapshot_id in own


def encode(ref: Ref, signer: Signer) -> bytes:
    """The stored document: {"ref": canonical text, "hmac": hex}."""
    entries = [[e.snapshot_id, e.parent_id, e.turn_number, e.boundary, e.forwarded, e.chain] for e in ref.entries]
    body = {
        "conversation": ref.conversation_id,
        "branch": ref.branch_name,
        "head": ref.head,
        "generation": ref.generation,
        "entries": entries,
    }
    return seal("ref", PURPOSE, body, signer)


def decode(data: bytes, signer: Signer, *, verify: bool = True) -> Ref:
    """SnapshotError for anything that is not a well-formed ref signed by this namespace."""
    body = open_signed(data, "ref", PURPOSE, signer, limit=MAX_REF_BYTES, verify=verify)
    document = parse_json_object(body, "ref")
    try:
        entries = document["entries"]
        if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_ENTRIES:
            raise SnapshotError(f"ref must have 1 to {MAX_ENTRIES} entries")
        ref = Ref(
            ids.check_conversation_id(_text(document["conversation"])),
            ids.check_branch_name(_text(document["branch"])),
            ids.check_snapshot_id(_text(document["head"])),
            _integer(document["generation"], 1 << 53),
            tuple(_entry(row) for row in entries),
        )
    except (KeyError, ValueError) as error:
        raise SnapshotError(f"ref is malformed: {error}") from None
    _ = ref.head_entry
    return ref


def open_signed(data: bytes, field: str, purpose: str, signer: Signer, *, limit: int, verify: bool) -> str:
    """The text of a small signed document {field: text, "hmac": hex}, after checking size and signature."""
    if len(data) > limit:
        raise SnapshotError(f"{field} of {len(data)} bytes exceeds {limit}")
    try:
        outer = parse_json_object(data.decode("utf-8"), field)
    except UnicodeDecodeError:
        raise SnapshotError(f"{field} is not UTF-8") from None
    body, signature = outer.get(field), outer.get("hmac")
    if set(outer) != {field, "hmac"} or not isinstance(body, str) or not isinstance(signature, str):
        raise SnapshotError(f"{field} is malformed")
    if verify and not signer.verify(purpose, body.encode("utf-8", "replace"), signature):
        raise SnapshotError(f"{field} signature does not match: forged, damaged, or of another tenant")
    return body


def seal(field: str, purpose: str, body: object, signer: Signer) -> bytes:
    """The inverse of open_signed for a JSON value."""
    text = canonical_json(body)
    return canonical_json({"hmac": signer.sign(purpose, text), field: text.decode()})


def _bounded(entries: tuple[RefEntry, ...]) -> tuple[RefEntry, ...]:
    return entries[-MAX_ENTRIES:]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value


def _integer(value: object, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise ValueError(f"expected an integer in [0, {high}]")
    return value


def _entry(row: object) -> RefEntry:
    if not isinstance(row, list) or len(row) != 6:
        raise ValueError("an entry has six items")
    snapshot_id, parent_id, turn, boundary, forwarded, chain = row
    chain = _text(chain)
    if _HEX64.fullmatch(chain) is None:
        raise ValueError("chain is malformed")
    return RefEntry(
        ids.check_snapshot_id(_text(snapshot_id)),
        None if parent_id is None else ids.check_snapshot_id(_text(parent_id)),
        _integer(turn, 1 << 31),
        check_boundary(_text(boundary)),
        _integer(forwarded, MAX_TOKENS),
        chain,
    )
