"""Typed reads and writes of one object store: the same layout on the disk tier and in the shared store.

Everything that is read is checked here (signature, limits, digests, shapes) unless `verify` is off; what to do about a
failure is decided above.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.io import digest, files, format, tensors
from engram_runtime.snapshots.io.store import ObjectInfo, ObjectStore
from engram_runtime.snapshots.policy import records, refs
from engram_runtime.snapshots.policy.identity import Keyring, Signer, tokens_from_bytes
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import PieceRef
from engram_runtime.snapshots.types import HostMemory, StateLayout

LIST_PAGE = 1000
MAX_LIVE = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredRef:
    """`ref` is None when the object is there but cannot be trusted; `tag` still allows to replace it."""

    ref: refs.Ref | None
    tag: str


class Repository:
    """One tier's durable content. Thread-safe."""

    def __init__(
        self,
        tier: str,
        store: ObjectStore,
        keyring: Keyring,
        layout: StateLayout,
        *,
        verify: bool = True,
        clock: Callable[[], float] = time.monotonic,
        memory: HostMemory | None = None,
    ) -> None:
        self.tier = tier
        self.store = store
        self._keyring = keyring
        self._layout = layout
        self._memory = memory or tensors.OrdinaryMemory()
        self._verify = verify
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[str, float] = {}  # KV key -> when it was last known to be there and referenced
        self._damaged: set[str] = set()

    def signer(self, space: Space) -> Signer:
        return self._keyring.signer(space.namespace)

    # Snapshot files

    def open_snapshot(self, space: Space, snapshot_id: str) -> files.OpenSnapshot:
        """Header and manifest. NotFound, SnapshotError, StoreUnavailable."""
        return self.open_snapshot_key(space, space.snapshot(snapshot_id), snapshot_id)

    def open_snapshot_key(self, space: Space, key: str, snapshot_id: str) -> files.OpenSnapshot:
        front, size = self.store.front(key, files.FRONT_BYTES)
        needed = format.header_bytes(front, size)
        if needed > len(front):
            front, size = self.store.front(key, needed)
        opened = files.open_snapshot(key, front, size, self.signer(space), verify=self._verify)
        if opened.manifest.snapshot_id != snapshot_id:
            raise SnapshotError("snapshot file holds another snapshot")
        if opened.manifest.state_abi[:16] != space.abi:
            raise SnapshotError("snapshot file belongs to another model")
        return opened

    def read_tokens(self, opened: files.OpenSnapshot) -> array[int]:
        """The forwarded token ids, checked."""
        return tokens_from_bytes(self._read_small(opened, "token_ids"))

    def read_messages(self, opened: files.OpenSnapshot) -> bytes | None:
        if opened.manifest.tensor("messages") is None:
            return None
        return self._read_small(opened, "messages")

    def read_state(self, opened: files.OpenSnapshot, prefix: str = "") -> dict[str, Tensor]:
        """All state tensors of the layout, each exact in shape and dtype, each checked. `prefix` is manifest.START for
        those at user_start."""
        files.check_state_entries(opened, self._layout, prefix)
        result = {}
        for name, spec in self._layout.states.items():
            tensor = tensors.allocate_state(spec, self._memory)
            view = tensors.view_bytes(tensor)
            self.store.read_into(opened.key, opened.header.tensors[prefix + name].offset, view)
            self._check(opened, prefix + name, view)
            result[name] = tensor
        return result

    def _read_small(self, opened: files.OpenSnapshot, name: str) -> bytes:
        entry = opened.header.tensors[name]
        end = entry.offset + entry.nbytes
        if end <= len(opened.front):
            data = opened.front[entry.offset : end]
        else:
            data = self.store.get(opened.key, entry.offset, entry.nbytes)
        if len(data) != entry.nbytes:
            raise SnapshotError(f"{name} is truncated")
        self._check(opened, name, memoryview(data))
        return data

    def _check(self, opened: files.OpenSnapshot, name: str, view: memoryview) -> None:
        ref = opened.manifest.tensor(name)
        if self._verify and ref is not None:
            digest.check(view, ref.digest, f"{name} of snapshot {opened.manifest.snapshot_id}")

    # KV files

    def read_piece(self, space: Space, ref: PieceRef) -> Tensor:
        """The whole tensor [L, 2, K, tensor_end - start, D] of a piece, checked."""
        expected = self._layout.kv_bytes_per_token * (ref.tensor_end - ref.start)
        if ref.nbytes != expected:
            raise SnapshotError(f"KV piece of {ref.nbytes} bytes, {expected} expected for its tokens")
        tensor = tensors.allocate_kv(self._layout, ref.tensor_end - ref.start, self._memory)
        view = tensors.view_bytes(tensor)
        key = space.kv(ref.file)
        self.store.read_into(key, ref.offset, view)
        if self._verify:
            digest.check(view, ref.digest, f"KV tokens [{ref.start}, {ref.tensor_end})")
        self.mark_live(key)
        return tensor

    def mark_live(self, key: str) -> None:
        """This file was just written, or read through a manifest that still referred to it."""
        with self._lock:
            if len(self._live) >= MAX_LIVE:
                self._live = dict(sorted(self._live.items(), key=lambda item: item[1])[MAX_LIVE // 2 :])
            self._live[key] = self._clock()
            self._damaged.discard(key)

    def is_live(self, key: str, within_seconds: float) -> bool:
        """Known to be there recently enough that no sweep can take it before a new manifest refers to it."""
        with self._lock:
            seen = self._live.get(key)
        return seen is not None and self._clock() - seen < within_seconds

    def forget(self, key: str, *, damaged: bool = False) -> None:
        """The file is going, or turned out to be missing or damaged: the next save writes it again."""
        with self._lock:
            self._live.pop(key, None)
            if damaged and len(self._damaged) < MAX_LIVE:
                self._damaged.add(key)

    def forget_seen(self) -> None:
        """The store was away, and may come back as another one (a bucket made anew, an empty volume)."""
        with self._lock:
            self._live.clear()

    def is_damaged(self, key: str) -> bool:
        """Found damaged by this process, and not written again since."""
        with self._lock:
            return key in self._damaged

    # Small records

    def read_anchor(self, space: Space, name: str) -> records.Anchor:
        data = self.store.get(space.anchor(name), 0, records.MAX_RECORD_BYTES + 1)
        return records.decode_anchor(data, name, self.signer(space), verify=self._verify)

    def write_anchor(self, space: Space, name: str, anchor: records.Anchor) -> None:
        self.store.put(space.anchor(name), [records.encode_anchor(anchor, name, self.signer(space))])

    def ref_key(self, space: Space, conversation_id: str, branch_name: str) -> str:
        signer = self.signer(space)
        return space.ref(signer.hide("conversation", conversation_id), signer.hide("branch", branch_name))

    def read_ref(self, space: Space, conversation_id: str, branch_name: str) -> StoredRef | None:
        """None when the branch does not exist."""
        try:
            data, tag = self.store.get_tagged(self.ref_key(space, conversation_id, branch_name))
        except NotFound:
            return None
        try:
            ref = refs.decode(data, self.signer(space), verify=self._verify)
        except SnapshotError:
            return StoredRef(None, tag)
        if (ref.conversation_id, ref.branch_name) != (conversation_id, branch_name):
            return StoredRef(None, tag)
        return StoredRef(ref, tag)

    def swap_ref(self, space: Space, ref: refs.Ref, expected: str | None) -> None:
        """Conflict when somebody else moved it."""
        key = self.ref_key(space, ref.conversation_id, ref.branch_name)
        self.store.compare_and_swap(key, refs.encode(ref, self.signer(space)), expected)

    def read_refs(self, space: Space, conversation_id: str) -> list[refs.Ref]:
        """All branches of a conversation; what cannot be trusted is left out."""
        signer = self.signer(space)
        found = []
        for info in self.objects(space.refs(signer.hide("conversation", conversation_id))):
            try:
                data = self.store.get(info.key)
            except NotFound:
                continue
            try:
                ref = refs.decode(data, signer, verify=self._verify)
            except SnapshotError:
                continue
            if ref.conversation_id == conversation_id:
                found.append(ref)
        return found

    def read_label(self, space: Space, snapshot_id: str) -> records.Label | None:
        """None when there is none; SnapshotError when there is one that cannot be trusted."""
        try:
            data = self.store.get(space.label(snapshot_id), 0, records.MAX_RECORD_BYTES + 1)
        except NotFound:
            return None
        return records.decode_label(data, snapshot_id, self.signer(space), verify=self._verify)

    def write_label(self, space: Space, snapshot_id: str, label: records.Label) -> None:
        self.store.put(space.label(snapshot_id), [records.encode_label(label, snapshot_id, self.signer(space))])

    def write_tombstone(self, space: Space, event_id: str, snapshot_ids: list[str]) -> None:
        self.store.put(
            space.tombstone(event_id), [records.encode_tombstone(snapshot_ids, event_id, self.signer(space))]
        )

    def read_tombstone(self, space: Space, event_id: str) -> list[str]:
        data = self.store.get(space.tombstone(event_id), 0, records.MAX_RECORD_BYTES + 1)
        return records.decode_tombstone(data, event_id, self.signer(space), verify=self._verify)

    def objects(self, prefix: str, after: str | None = None) -> Iterator[ObjectInfo]:
        """Everything below a prefix, page by page."""
        while True:
            page = self.store.list(prefix, after=after, limit=LIST_PAGE)
            yield from page
            if len(page) < LIST_PAGE:
                return
            after = page[-1].key
