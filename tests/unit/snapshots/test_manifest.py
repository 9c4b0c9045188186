"""Manifests, refs and the small records: exact round trips, and nothing but SnapshotError for anything else."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.policy import ids, manifest, records, refs
from engram_runtime.snapshots.policy.boundaries import check_boundary, rank
from engram_runtime.snapshots.policy.identity import Keyring, canonical_json
from engram_runtime.snapshots.policy.manifest import AnchorRef, Manifest, PieceRef, TensorRef

SIGNER = Keyring(b"k" * 32).signer("n" * 32)
OTHER = Keyring(b"o" * 32).signer("n" * 32)
HEX64 = st.text("0123456789abcdef", min_size=64, max_size=64)
ID = st.builds(lambda n: f"{n:032x}", st.integers(0, 2**128 - 1))
DIGEST = st.builds(lambda algorithm, value: f"{algorithm}:{value}", st.sampled_from(["blake3", "sha256"]), HEX64)
PRINTABLE = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=30)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    ends = sorted(draw(st.sets(st.integers(1, 5000), min_size=1, max_size=6)))
    pieces = []
    for start, end in zip([0, *ends], ends, strict=False):
        longer = end + draw(st.integers(0, 3))
        pieces.append(
            PieceRef(
                draw(HEX64), "kv.0", start, end, longer, draw(HEX64), draw(st.integers(8, 2**30)), 64, draw(DIGEST)
            )
        )
    created = draw(st.floats(0, 1e11))
    return Manifest(
        snapshot_id=draw(ID),
        parent_id=draw(st.none() | ID),
        state_abi=draw(HEX64),
        conversation_id=draw(PRINTABLE),
        branch_name=draw(st.sampled_from(["main", "main~00ff", "b.1"])),
        turn_number=draw(st.integers(0, 10_000)),
        boundary=draw(st.sampled_from(["user_start", "history", "turn_end", "next_history", "manual"])),
        forwarded=ends[-1],
        pending_ids=tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=4))),
        chain=draw(HEX64),
        pieces=tuple(pieces) if draw(st.booleans()) else (),
        tensors=(TensorRef("token_ids", 4 * ends[-1], draw(DIGEST)), TensorRef("ssm", 8, draw(DIGEST))),
        anchors=(AnchorRef(ends[-1], draw(HEX64)),),
        tokenizer_digest=draw(PRINTABLE),
        template_digest="",
        created=created,
        expires=draw(st.none() | st.floats(0, 1e11)),
        pinned=draw(st.booleans()),
        tag=draw(st.none() | PRINTABLE),
    )


@given(manifests())
def test_round_trip(original: Manifest) -> None:
    text, signature = manifest.sign(original, SIGNER)
    assert manifest.decode(text, signature, SIGNER) == original


@given(manifests(), st.data())
def test_any_changed_byte_is_refused(original: Manifest, data: st.DataObject) -> None:
    text, signature = manifest.sign(original, SIGNER)
    index = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[index]))
    with pytest.raises(SnapshotError, match="signature"):
        manifest.decode(text[:index] + character + text[index + 1 :], signature, SIGNER)
    for bad in (SIGNER.sign("ref", text.encode()), OTHER.sign(manifest.PURPOSE, text.encode()), "", "x"):
        with pytest.raises(SnapshotError, match="signature"):
            manifest.decode(text, bad, SIGNER)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=15,
)


@given(manifests(), st.data())
def test_wrong_fields_are_snapshot_errors_even_without_the_signature(original: Manifest, data: st.DataObject) -> None:
    """With checks off (tamper tests) a manifest can at worst be refused."""
    document: dict[str, Any] = json.loads(manifest.encode(original))
    field = data.draw(st.sampled_from(sorted(document)))
    value = data.draw(JSON)
    if data.draw(st.booleans()) and isinstance(document[field], list) and document[field]:
        row = document[field][0]
        if isinstance(row, list):
            row[data.draw(st.integers(0, len(row) - 1))] = value
    else:
        document[field] = value
    with suppress(SnapshotError):
        decoded = manifest.decode(json.dumps(document), "", SIGNER, verify=False)
        assert json.loads(manifest.encode(decoded)) == document


@given(st.text(max_size=200))
def test_garbage(text: str) -> None:
    for decode in (
        lambda: manifest.decode(text, "", SIGNER, verify=False),
        lambda: refs.decode(text.encode("utf-8", "replace"), SIGNER, verify=False),
        lambda: records.decode_anchor(text.encode("utf-8", "replace"), "n", SIGNER, verify=False),
        lambda: records.decode_label(text.encode("utf-8", "replace"), "n", SIGNER, verify=False),
        lambda: records.decode_tombstone(text.encode("utf-8", "replace"), "n", SIGNER, verify=False),
    ):
        with pytest.raises(SnapshotError):
            decode()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 20_000, '{"a":1,"a":2}', '{"a":NaN}', "9" * 10_000, "\ud800"]
)
def test_hostile_json(text: str) -> None:
    with pytest.raises(SnapshotError):
        manifest.decode(text, "", SIGNER, verify=False)


def entry(
    number: int, turn: int = 1, parent: int | None = None, forwarded: int = 10, chain: str = "aa" * 32
) -> refs.RefEntry:
    return refs.RefEntry(
        f"{number:032x}", None if parent is None else f"{parent:032x}", turn, "turn_end", forwarded, chain
    )


def head(*entries: refs.RefEntry) -> refs.Ref:
    return refs.Ref("conversation", "main", entries[-1].snapshot_id, 1, entries)


def test_ref_round_trip_and_bounds() -> None:
    ref = head(*(entry(n) for n in range(300)))
    with pytest.raises(SnapshotError, match="entries"):
        refs.decode(refs.encode(ref, SIGNER), SIGNER)
    ref = head(entry(0)).advance(entry(1, parent=0))
    for n in range(2, 300):
        ref = ref.advance(entry(n, parent=n - 1))
    assert len(ref.entries) == refs.MAX_ENTRIES
    assert ref.generation == 300
    again = refs.decode(refs.encode(ref, SIGNER), SIGNER)
    assert again == ref
    assert len(refs.encode(ref, SIGNER)) < refs.MAX_REF_BYTES
    with pytest.raises(SnapshotError, match="signature"):
        refs.decode(refs.encode(ref, OTHER), SIGNER)
    broken = refs.Ref("conversation", "main", f"{999:032x}", 1, ref.entries)
    with pytest.raises(SnapshotError, match="head"):
        refs.decode(refs.encode(broken, SIGNER), SIGNER)


def test_ref_after_deletions() -> None:
    ref = head(entry(1), entry(2), entry(3))
    assert ref.without(frozenset({f"{3:032x}"})) is not None
    assert ref.without(frozenset({f"{3:032x}"})).head == f"{2:032x}"  # type: ignore[union-attr]
    assert ref.without(frozenset({f"{1:032x}"})).head == f"{3:032x}"  # type: ignore[union-attr]
    assert ref.without(frozenset(e.snapshot_id for e in ref.entries)) is None
    late = ref.listing(entry(9))
    assert late.head == ref.head
    assert [e.snapshot_id for e in late.entries][-2:] == [f"{9:032x}", f"{3:032x}"]


def offered(number: int, turn: int, parent: int | None, forwarded: int = 20, boundary: str = "turn_end") -> Manifest:
    return Manifest(
        f"{number:032x}", None if parent is None else f"{parent:032x}", "0" * 64, "conversation", "main",
        turn, boundary, forwarded, (), "bb" * 32, (), (), (), "", "", 1.0,
    )  # fmt: skip


def test_who_may_advance_the_head() -> None:
    ref = head(entry(1), entry(2, turn=2, parent=1, forwarded=15))
    no = lambda n: "cc" * 32  # noqa: E731
    yes = lambda n: "aa" * 32  # noqa: E731
    assert refs.may_advance(ref, offered(2, 2, 1), no)  # a retry
    assert refs.may_advance(ref, offered(3, 3, 2), no)  # the head is its parent
    assert refs.may_advance(ref, offered(3, 3, None), yes)  # its tokens go on from the head's
    assert not refs.may_advance(ref, offered(3, 2, 1), no)  # another turn 2
    assert not refs.may_advance(ref, offered(3, 2, 1, forwarded=14), yes)  # shorter than the head
    assert not refs.may_advance(ref, offered(3, 3, 1), no)  # from before the head
    own = {f"{2:032x}"}
    assert refs.may_advance(ref, offered(3, 2, 1, boundary="next_history"), no, own)  # the same turn, later
    assert refs.may_advance(ref, offered(3, 3, 9), no, own)  # the turn after it
    assert not refs.may_advance(ref, offered(3, 2, 1, boundary="turn_end"), no, own)  # the same turn again
    assert not refs.may_advance(ref, offered(3, 2, 1, boundary="history"), no, own)


@given(
    HEX64, ID, st.integers(1, 10**6), st.none() | st.booleans(), st.none() | PRINTABLE, st.none() | st.floats(0, 1e11)
)
def test_records_round_trip(
    name: str, snapshot_id: str, position: int, pinned: bool | None, tag: str | None, expires: float | None
) -> None:
    anchor = records.Anchor(snapshot_id, position)
    data = records.encode_anchor(anchor, name, SIGNER)
    assert records.decode_anchor(data, name, SIGNER) == anchor
    with pytest.raises(SnapshotError, match="signature"):
        records.decode_anchor(data, "0" * 63 + "g", SIGNER)  # copied to another name
    label = records.Label(pinned, tag, expires)
    assert records.decode_label(records.encode_label(label, snapshot_id, SIGNER), snapshot_id, SIGNER) == label
    gone = [snapshot_id, ids.new_id()]
    assert records.decode_tombstone(records.encode_tombstone(gone, name, SIGNER), name, SIGNER) == gone
    for bad in ({"snapshot": "x", "position": 1}, {"snapshot": snapshot_id, "position": 0}, {}):
        sealed = refs.seal("anchor", f"anchor-{name}", bad, SIGNER)
        with pytest.raises(SnapshotError):
            records.decode_anchor(sealed, name, SIGNER)


def test_boundaries_are_ordered() -> None:
    assert rank("user_start") < rank("history") < rank("turn_end") < rank("next_history")
    with pytest.raises(ValueError, match="boundary"):
        check_boundary("middle")
    assert canonical_json("é") == b'"\\u00e9"'
