"""The order of writes that makes a save atomic: content, then the manifest, then anchors, then the head.

The snapshot file's one atomic put is the commit. Before it nothing refers to what was written (garbage that a sweep
takes); after it everything it refers to is there. At most five puts: KV file, snapshot file, two anchors, head. A
writer whose turn is not a continuation of the head, or that loses the swap to one, opens a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from engram_runtime.errors import Conflict, NotFound, SnapshotError
from engram_runtime.snapshots.io import files, format
from engram_runtime.snapshots.io.repository import Repository, StoredRef
from engram_runtime.snapshots.io.store import StoreUnavailable
from engram_runtime.snapshots.policy import ids, refs
from engram_runtime.snapshots.policy.identity import TokenChain, anchor_name
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest
from engram_runtime.snapshots.policy.records import Anchor

SWAP_ATTEMPTS = 16

FileSource = Callable[[str], Sequence[memoryview | bytes]]
Heirs = Mapping[str, str]  # chain key at the end of a piece -> id of a snapshot that holds the piece


class HeadRule(Enum):
    """What to do when the branch's head is not one that the snapshot continues."""

    CONTEST = "open a branch"  # the tier whose heads count
    MIRROR = "move it all the same"  # a disk in front of a shared store, which decides
    YIELD = "leave it"  # an older snapshot that is only being copied to another tier


class PieceLost(SnapshotError):
    """A KV file that the snapshot needs is on no tier any more."""

    def __init__(self, file: str) -> None:
        super().__init__(f"KV file {file[:12]} is on no tier any more")
        self.file = file


@dataclass(frozen=True, slots=True)
class Draft:
    """A snapshot ready to be written. `kv` holds the pieces it adds, None when it adds none."""

    space: Space
    chain: TokenChain
    manifest: Manifest
    content: files.SnapshotParts
    kv: files.KVFile | None

    @property
    def nbytes(self) -> int:
        """Upper bound of what a tier must have room for: files with their padding, and the small records."""
        kv = 0 if self.kv is None else self.kv.image.nbytes
        padded = sum(part.data.nbytes + format.ALIGNMENT for part in self.content.parts)
        return kv + padded + 6 * format.ALIGNMENT


def commit(
    repository: Repository,
    draft: Draft,
    *,
    source: FileSource,
    live_seconds: float,
    own: Collection[str],
    rule: HeadRule,
) -> Manifest:
    """Write `draft`; returns its manifest, on another branch if it lost. Safe to repeat after a failure.

    `source(file)` gives the bytes of a KV file that this tier lacks (PieceLost when nobody has it). A file seen within
    `live_seconds` needs no second look. Raises StoreUnavailable, PieceLost.
    """
    for file in sorted(draft.manifest.files()):
        _ensure_file(repository, draft, file, source, live_seconds)
    manifest = draft.manifest
    stored = repository.read_ref(draft.space, manifest.conversation_id, manifest.branch_name)
    if _lost(stored, draft, manifest, own):
        stored = _without_dead_head(repository, draft.space, stored)
    lost = _lost(stored, draft, manifest, own)
    if lost and rule is HeadRule.CONTEST:
        manifest = manifest.on_branch(ids.losing_branch(manifest.branch_name))
        stored = None
    _put_snapshot(repository, draft, manifest)
    for anchor in manifest.anchors:
        repository.write_anchor(draft.space, anchor.name, Anchor(manifest.snapshot_id, anchor.position))
    for _ in range(SWAP_ATTEMPTS):
        if lost and rule is HeadRule.YIELD:
            return manifest
        try:
            _swap(repository, draft.space, manifest, stored)
            return manifest
        except Conflict:
            stored = repository.read_ref(draft.space, manifest.conversation_id, manifest.branch_name)
        lost = _lost(stored, draft, manifest, own)
        if lost and rule is HeadRule.CONTEST:
            manifest = manifest.on_branch(ids.losing_branch(manifest.branch_name))
            stored = None
            _put_snapshot(repository, draft, manifest)
    raise Conflict(f"the head of branch {manifest.branch_name!r} keeps moving")


def move_to_branch(repository: Repository, draft: Draft, manifest: Manifest) -> None:
    """A mirror learns that the shared store gave the snapshot another branch than `draft` says."""
    _put_snapshot(repository, draft, manifest)
    drop_from_ref(repository, draft.space, draft.manifest)
    force_head(repository, draft.space, manifest)


def adopt(repository: Repository, space: Space, chain: TokenChain, manifest: Manifest, own: Collection[str]) -> None:
    """Finish the commit of a writer that died between the manifest and the head: anchors, then the head if it may move.

    Changes nothing for a snapshot that its branch already lists. NotFound when the snapshot is not there (any more).
    """
    for _ in range(SWAP_ATTEMPTS):
        repository.store.head(space.snapshot(manifest.snapshot_id))
        stored = repository.read_ref(space, manifest.conversation_id, manifest.branch_name)
        if stored is not None and stored.ref is not None:
            listed = stored.ref.entry(manifest.snapshot_id) is not None
            if listed or not refs.may_advance(stored.ref, manifest, chain.key, own):
                return
        for anchor in manifest.anchors:
            repository.write_anchor(space, anchor.name, Anchor(manifest.snapshot_id, anchor.position))
        try:
            _swap(repository, space, manifest, stored)
        except Conflict:
            continue
        try:
            repository.store.head(space.snapshot(manifest.snapshot_id))
        except NotFound:
            drop_from_ref(repository, space, manifest)  # deleted in between
            raise
        return


def force_head(repository: Repository, space: Space, manifest: Manifest) -> None:
    """Make it the head of its branch, whatever the head was."""
    for _ in range(SWAP_ATTEMPTS):
        stored = repository.read_ref(space, manifest.conversation_id, manifest.branch_name)
        try:
            _swap(repository, space, manifest, stored, force=True)
            return
        except Conflict:
            continue
    raise Conflict(f"the head of branch {manifest.branch_name!r} keeps moving")


def erase(repository: Repository, space: Space, manifest: Manifest, heirs: Heirs = MappingProxyType({})) -> None:
    """As erase_all, of one."""
    erase_all(repository, space, [manifest], heirs)


def erase_all(
    repository: Repository, space: Space, manifests: Sequence[Manifest], heirs: Heirs = MappingProxyType({})
) -> None:
    """Take snapshots out of a repository: heads, manifests (from then on they are not there), anchors, labels. KV files
    are left to the sweep. `heirs` names snapshots that stay and have the same pieces. Deleting what is gone already is
    not an error."""
    for manifest in manifests:
        for branch in {manifest.branch_name, _stored_branch(repository, space, manifest)}:
            drop_from_ref(repository, space, manifest.on_branch(branch))
    repository.store.delete_many([space.snapshot(manifest.snapshot_id) for manifest in manifests])
    leftovers = [space.label(manifest.snapshot_id) for manifest in manifests]
    for manifest in manifests:
        leftovers += _own_anchors(repository, space, manifest, heirs)
    repository.store.delete_many(list(dict.fromkeys(leftovers)))


def _stored_branch(repository: Repository, space: Space, manifest: Manifest) -> str:
    """Its branch as stored now: whoever read the manifest earlier may have read it before it lost its head."""
    try:
        return repository.open_snapshot(space, manifest.snapshot_id).manifest.branch_name
    except StoreUnavailable:
        raise
    except SnapshotError:
        return manifest.branch_name


def drop_from_ref(repository: Repository, space: Space, manifest: Manifest) -> None:
    """Take a snapshot out of its branch; the head falls back to the newest one left."""
    for _ in range(SWAP_ATTEMPTS):
        stored = repository.read_ref(space, manifest.conversation_id, manifest.branch_name)
        if stored is None or stored.ref is None or stored.ref.entry(manifest.snapshot_id) is None:
            return
        remaining = stored.ref.without(frozenset({manifest.snapshot_id}))
        try:
            if remaining is None:
                repository.store.delete(repository.ref_key(space, manifest.conversation_id, manifest.branch_name))
            else:
                repository.swap_ref(space, remaining, stored.tag)
            return
        except Conflict:
            continue
    raise Conflict(f"the head of branch {manifest.branch_name!r} keeps moving")


def _own_anchors(repository: Repository, space: Space, manifest: Manifest, heirs: Heirs) -> list[str]:
    """Keys of the snapshot's anchors that are to be deleted; gives those to an heir that has the same tokens, and
    leaves those that a newer snapshot took over."""
    found = []
    chains = {anchor_name(piece.chain): piece for piece in manifest.pieces if piece.end == piece.tensor_end}
    for name in {anchor.name for anchor in manifest.anchors} | chains.keys():
        try:
            if repository.read_anchor(space, name).snapshot_id != manifest.snapshot_id:
                continue
        except StoreUnavailable:
            raise
        except NotFound:
            continue
        except SnapshotError:
            pass  # nobody can use a damaged one
        piece = chains.get(name)
        heir = None if piece is None else heirs.get(piece.chain)
        if piece is not None and heir is not None:
            repository.write_anchor(space, name, Anchor(heir, piece.end))
        else:
            found.append(space.anchor(name))
    return found


def _ensure_file(repository: Repository, draft: Draft, file: str, source: FileSource, live_seconds: float) -> None:
    """The file is there and no sweep will take it before the manifest refers to it."""
    key = draft.space.kv(file)
    if repository.is_live(key, live_seconds):
        return
    new = draft.kv is not None and draft.kv.name == file
    damaged = repository.is_damaged(key)
    if not new and not damaged:
        try:
            repository.store.touch(key)
            repository.mark_live(key)
            return
        except NotFound:
            pass
    parts = draft.kv.image.parts if new and draft.kv is not None else source(file)
    try:
        repository.store.put(key, parts, if_absent=not damaged)
    except Conflict:
        # Somebody wrote these very bytes before (the name says so). They may be condemned: touch, or write again.
        try:
            repository.store.touch(key)
        except NotFound:
            repository.store.put(key, parts)
    repository.mark_live(key)


def _put_snapshot(repository: Repository, draft: Draft, manifest: Manifest) -> None:
    image = files.build_snapshot_file(manifest, draft.content, repository.signer(draft.space))
    repository.store.put(draft.space.snapshot(manifest.snapshot_id), image.parts)


def _lost(stored: StoredRef | None, draft: Draft, manifest: Manifest, own: Collection[str]) -> bool:
    if stored is None or stored.ref is None:
        return False
    if stored.ref.led_on(manifest.snapshot_id):
        return False
    return not refs.may_advance(stored.ref, manifest, draft.chain.key, own)


def _without_dead_head(repository: Repository, space: Space, stored: StoredRef | None) -> StoredRef | None:
    """A snapshot deleted by somebody else just before its head was moved to it leaves a head that is not there; a turn
    must not become a branch because of it."""
    while stored is not None and stored.ref is not None:
        try:
            repository.store.head(space.snapshot(stored.ref.head))
            break
        except NotFound:
            stored = StoredRef(stored.ref.without(frozenset({stored.ref.head})), stored.tag)
    return stored


def _swap(
    repository: Repository, space: Space, manifest: Manifest, stored: StoredRef | None, *, force: bool = False
) -> None:
    """One attempt. A record that cannot be trusted is replaced; a turn whose continuation is listed is only listed."""
    if stored is None:
        repository.swap_ref(space, refs.new_ref(manifest), None)
    elif stored.ref is None:
        repository.swap_ref(space, refs.new_ref(manifest), stored.tag)
    elif stored.ref.head != manifest.snapshot_id:
        entry = refs.RefEntry.of(manifest)
        late = not force and stored.ref.led_on(manifest.snapshot_id)
        repository.swap_ref(space, stored.ref.listing(entry) if late else stored.ref.advance(entry), stored.tag)
