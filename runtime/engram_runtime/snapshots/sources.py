"""Finds the bytes of a KV file for a tier that lacks it: jobs in flight, the host tier, the other durable tiers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.catalogue import Catalogue, Record
from engram_runtime.snapshots.commit import PieceLost
from engram_runtime.snapshots.io import digest, files, format
from engram_runtime.snapshots.io.host_tier import HostTier, ItemKey
from engram_runtime.snapshots.policy.identity import TokenChain
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest, PieceRef, parse_json_object
from engram_runtime.snapshots.tiers import Tier
from engram_runtime.snapshots.types import StateLayout

HOST_ATTEMPTS = 4


class FileSources:
    """Thread-safe."""

    def __init__(self, catalogue: Catalogue, host: HostTier, tiers: Sequence[Tier], layout: StateLayout) -> None:
        self._catalogue = catalogue
        self._host = host
        self._tiers = tiers
        self._layout = layout
        self._lock = threading.Lock()
        self._held: dict[tuple[Space, str], tuple[files.KVFile, int]] = {}

    def hold(self, space: Space, kv: files.KVFile) -> None:
        """Keep a new file's bytes until every tier has it."""
        with self._lock:
            _, holders = self._held.get((space, kv.name), (kv, 0))
            self._held[space, kv.name] = (kv, holders + 1)

    def let_go(self, space: Space, kv: files.KVFile) -> None:
        with self._lock:
            held, holders = self._held[space, kv.name]
            if holders == 1:
                del self._held[space, kv.name]
            else:
                self._held[space, kv.name] = (held, holders - 1)

    def vouch(self, space: Space, manifest: Manifest, live_seconds: float) -> None:
        """A snapshot that is there protects its files: one look at it instead of one at each of them."""
        for tier in self._tiers:
            repository = tier.repository
            unseen = [key for key in map(space.kv, manifest.files()) if not repository.is_live(key, live_seconds)]
            if not unseen:
                continue
            with suppress(SnapshotError), tier.reading():
                repository.store.head(space.snapshot(manifest.snapshot_id))
                for key in unseen:
                    if not repository.is_damaged(key):
                        repository.mark_live(key)

    def exists(self, space: Space, ref: PieceRef, live_seconds: float) -> bool:
        """Is the piece somewhere, for certain? Asked before a new snapshot relies on it."""
        with self._lock:
            if (space, ref.file) in self._held:
                return True
        if ItemKey(space, ref.file, ref.tensor) in self._host:
            return True
        key = space.kv(ref.file)
        for tier in self._tiers:
            if tier.repository.is_damaged(key):
                continue
            if tier.repository.is_live(key, live_seconds):
                return True
            try:
                with tier.writing():
                    tier.repository.store.touch(key)
                tier.repository.mark_live(key)
                return True
            except SnapshotError:
                continue
        return False

    def read(self, space: Space, file: str) -> Sequence[memoryview | bytes]:
        """All of a KV file. PieceLost when nobody has it (or has it whole)."""
        with self._lock:
            held = self._held.get((space, file))
        if held is not None:
            return held[0].image.parts
        users = [record for record in self._catalogue.records(space) if file in record.manifest.files()]
        for record in users[:HOST_ATTEMPTS]:  # the oldest is the one that wrote it, and knows all of its pieces
            image = self._from_host(record, file)
            if image is not None:
                return image.parts
        for tier in self._tiers:
            try:
                with tier.reading():
                    data = tier.repository.store.get(space.kv(file))
                check_kv_file(data, file)
                return [data]
            except SnapshotError:
                continue
        raise PieceLost(file)

    def _from_host(self, record: Record, file: str) -> format.FileImage | None:
        """Built again from pieces in memory; the name proves that it is the same file."""
        pieces = []
        for ref in record.manifest.pieces:
            if ref.file != file:
                continue
            value = self._host.get(ItemKey(record.space, file, ref.tensor))
            if value is None or ref.end != ref.tensor_end:
                return None
            pieces.append((ref.start, ref.end, value["kv"]))
        # The chain keys are in the manifest; only the tokens' bytes are needed, so any root gives the same layout.
        chain = _PieceChain(record)
        built = files.build_kv_file(chain, self._layout, pieces)
        return built.image if built.name == file else None


class _PieceChain(TokenChain):
    """A chain that knows the keys which the manifest recorded."""

    def __init__(self, record: Record) -> None:
        super().__init__(b"", record.tokens)
        self._known = {ref.tensor_end: ref.chain for ref in record.manifest.pieces}

    def key(self, position: int) -> str:
        return self._known[position]


def check_kv_file(data: bytes, name: str) -> list[PieceRef]:
    """Verify a whole KV file against its name and its digests, without any key; its pieces. SnapshotError."""
    header = format.parse(data, len(data))
    if header.metadata.get("format") != files.KV_FORMAT:
        raise SnapshotError(f"format is not {files.KV_FORMAT}")
    text = header.metadata.get(files.PIECES_KEY, "")
    if files.kv_name(text) != name:
        raise SnapshotError("KV file is not what its name says")
    table = parse_json_object(f'{{"pieces":{text}}}', "pieces")["pieces"]
    if not isinstance(table, list):
        raise SnapshotError("pieces are malformed")
    found = []
    for row in table:
        if not isinstance(row, list) or len(row) != 5:
            raise SnapshotError("pieces are malformed")
        tensor, start, end, chain, expected = row
        entry = header.tensors.get(tensor) if isinstance(tensor, str) else None
        if entry is None or not all(isinstance(text, str) for text in (chain, expected)):
            raise SnapshotError("pieces are malformed")
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end):
            raise SnapshotError("pieces are malformed")
        view = memoryview(data)[entry.offset : entry.offset + entry.nbytes]
        digest.check(view, expected, f"KV tokens [{start}, {end})")
        found.append(PieceRef(name, entry.name, start, end, end, chain, entry.offset, entry.nbytes, expected))
    return found
