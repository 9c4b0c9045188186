"""Verifies every object of a repository: signatures, checksums, references; and, when asked, repairs.

Repair only removes: what is damaged or forged cannot be made whole from itself, and a snapshot that lacks a piece
restores nothing. Heads that point at something removed fall back to the newest snapshot of their branch.
"""

from __future__ import annotations

from collections.abc import Callable

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots import inventory
from engram_runtime.snapshots.inventory import Inventory
from engram_runtime.snapshots.io import digest, files, format
from engram_runtime.snapshots.io.repository import Repository
from engram_runtime.snapshots.io.store import ObjectInfo, StoreUnavailable
from engram_runtime.snapshots.policy import keys, records, refs
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest, PieceRef
from engram_runtime.snapshots.sources import check_kv_file
from engram_runtime.snapshots.types import FsckProblem, FsckReport


def check(repository: Repository, *, repair: bool = False) -> FsckReport:
    """Reads everything. StoreUnavailable when the store cannot be read."""
    listing = inventory.take(repository.objects(keys.ROOT))
    run = _Run(repository, listing, repair)
    run.check_kv_files()
    run.check_snapshots()
    run.check_refs()
    run.check_anchors()
    run.judge()
    run.check_leftovers()
    return FsckReport(repository.tier, len(listing.snapshots), len(listing.kv), listing.nbytes, run.problems)


class _Run:
    def __init__(self, repository: Repository, listing: Inventory, repair: bool) -> None:
        self.repository = repository
        self.listing = listing
        self.repair = repair
        self.problems: list[FsckProblem] = []
        self.pieces: dict[tuple[Space, str], list[PieceRef]] = {}
        self.whole: dict[tuple[Space, str], Manifest] = {}
        self.verified: set[str] = set()  # namespaces in which some signature is ours
        self.unsigned: list[tuple[str, ObjectInfo, str]] = []

    def check_kv_files(self) -> None:
        for (space, name), info in self.listing.kv.items():
            try:
                self.pieces[space, name] = check_kv_file(self.repository.store.get(info.key), name)
            except StoreUnavailable:
                raise
            except NotFound:
                continue  # deleted since the listing
            except SnapshotError as error:
                self.found("damaged", info.key, str(error), self.deleter(info))

    def check_snapshots(self) -> None:
        for (space, snapshot_id), info in self.listing.snapshots.items():
            try:
                self.whole[space, snapshot_id] = self.read_snapshot(space, snapshot_id, info)
                self.verified.add(space.namespace)
            except StoreUnavailable:
                raise
            except NotFound:
                continue
            except _Missing as error:
                self.verified.add(space.namespace)
                self.found("missing", info.key, str(error), self.deleter(info))
            except SnapshotError as error:
                self.unreadable(space, info, error)

    def read_snapshot(self, space: Space, snapshot_id: str, info: ObjectInfo) -> Manifest:
        data = self.repository.store.get(info.key)
        header = format.header_bytes(data, len(data))
        signer = self.repository.signer(space)
        opened = files.open_snapshot(info.key, data[:header], len(data), signer, verify=True)
        manifest = opened.manifest
        if manifest.snapshot_id != snapshot_id:
            raise SnapshotError("it holds another snapshot")
        for ref in manifest.tensors:
            entry = opened.header.tensors[ref.name]
            digest.check(memoryview(data)[entry.offset : entry.offset + entry.nbytes], ref.digest, ref.name)
        for piece in manifest.pieces:
            self.check_piece(space, piece)
        return manifest

    def check_piece(self, space: Space, piece: PieceRef) -> None:
        held = self.pieces.get((space, piece.file))
        if held is None and (space, piece.file) not in self.listing.kv:
            held = self.written_meanwhile(space, piece.file)
        if held is None:
            raise _Missing(f"KV file {piece.file[:12]} is missing or damaged")
        for candidate in held:
            same_place = (candidate.tensor, candidate.offset, candidate.nbytes) == (
                piece.tensor,
                piece.offset,
                piece.nbytes,
            )
            if same_place and candidate.digest == piece.digest:
                return
        raise _Missing(f"KV file {piece.file[:12]} does not hold tokens [{piece.start}, {piece.tensor_end})")

    def written_meanwhile(self, space: Space, file: str) -> list[PieceRef] | None:
        """A listing takes time, and writers go on: look again before calling a file missing."""
        try:
            self.pieces[space, file] = check_kv_file(self.repository.store.get(space.kv(file)), file)
        except NotFound:
            return None
        return self.pieces[space, file]

    def is_there(self, space: Space, snapshot_id: str) -> bool:
        if (space, snapshot_id) in self.listing.snapshots:
            return (space, snapshot_id) in self.whole
        try:
            self.repository.store.head(space.snapshot(snapshot_id))
        except NotFound:
            return False
        return True

    def check_refs(self) -> None:
        for space, _, info in self.listing.other.get("ref", []):
            try:
                data, tag = self.repository.store.get_tagged(info.key)
                ref = refs.decode(data, self.repository.signer(space))
            except StoreUnavailable:
                raise
            except NotFound:
                continue
            except SnapshotError as error:
                self.unreadable(space, info, error)
                continue
            self.verified.add(space.namespace)
            gone = frozenset(e.snapshot_id for e in ref.entries if not self.is_there(space, e.snapshot_id))
            if ref.head in gone:
                fix = self.ref_fixer(space, ref, gone, tag, info)
                self.found("dangling", info.key, f"its head {ref.head} is not there", fix)

    def ref_fixer(
        self, space: Space, ref: refs.Ref, gone: frozenset[str], tag: str, info: ObjectInfo
    ) -> Callable[[], None]:
        def fix() -> None:
            remaining = ref.without(gone)
            if remaining is None:
                self.delete(info)
            else:
                self.repository.swap_ref(space, remaining, tag)

        return fix

    def check_anchors(self) -> None:
        for space, name, info in self.listing.other.get("anchor", []):
            try:
                anchor = records.decode_anchor(self.repository.store.get(info.key), name, self.repository.signer(space))
            except StoreUnavailable:
                raise
            except NotFound:
                continue
            except SnapshotError as error:
                self.unreadable(space, info, error)
                continue
            self.verified.add(space.namespace)
            if not self.is_there(space, anchor.snapshot_id):
                message = f"its snapshot {anchor.snapshot_id} is not there"
                self.found("orphan", info.key, message, self.deleter(info))

    def unreadable(self, space: Space, info: ObjectInfo, error: SnapshotError) -> None:
        if "signature" in str(error):
            self.unsigned.append((space.namespace, info, str(error)))
        else:
            self.found("damaged", info.key, str(error), self.deleter(info))

    def judge(self) -> None:
        """A wrong signature among right ones is a forgery; where none is right, the key is another one."""
        for namespace, info, message in self.unsigned:
            if namespace in self.verified:
                self.found("forged", info.key, message, self.deleter(info))
        for namespace in sorted({namespace for namespace, _, _ in self.unsigned} - self.verified):
            message = "nothing in it is signed with this tenant key: it is left alone"
            self.found("foreign", f"{keys.ROOT}{namespace}/", message, None)

    def check_leftovers(self) -> None:
        foreign = {namespace for namespace, _, _ in self.unsigned} - self.verified
        for (space, name), info in inventory.unreferenced(self.listing, self.whole).items():
            if (space, name) in self.pieces and space.namespace not in foreign:
                self.found("orphan", info.key, "no snapshot needs it", None)  # the sweep's, after its grace period
        for (space, snapshot_id), info in self.listing.labels.items():
            if space.namespace not in foreign and not self.is_there(space, snapshot_id):
                self.found("orphan", info.key, "its snapshot is not there", self.deleter(info))
        for info in self.listing.unknown:
            self.found("unknown", info.key, "not an object of ours", None)

    def deleter(self, info: ObjectInfo) -> Callable[[], None]:
        return lambda: self.delete(info)

    def delete(self, info: ObjectInfo) -> None:
        self.repository.forget(info.key)
        self.repository.store.delete(info.key)

    def found(self, kind: str, key: str, message: str, fix: Callable[[], None] | None) -> None:
        repaired = False
        if self.repair and fix is not None:
            fix()
            repaired = True
        self.problems.append(FsckProblem(kind, key, message, repaired))


class _Missing(SnapshotError):
    """A snapshot lacks a piece."""
