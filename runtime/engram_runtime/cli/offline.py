"""Snapshots of a store without a server: for a machine that only has the store and the key.

Needs no model: manifests say what they are. A server that uses the store meanwhile learns of deletions by the same
records it gets from its peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engram_runtime.cli.lazy import CommandError
from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.server.tenant_key import read_tenant_key
from engram_runtime.snapshots import commit, fsck
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.io.repository import Repository
from engram_runtime.snapshots.io.s3.options import S3Options
from engram_runtime.snapshots.policy import keys
from engram_runtime.snapshots.policy.identity import Keyring
from engram_runtime.snapshots.policy.ids import check_snapshot_id, check_tenant, new_id
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest
from engram_runtime.snapshots.policy.records import effective_expiry
from engram_runtime.snapshots.service import open_store as open_object_store
from engram_runtime.snapshots.types import StateLayout

TIER = "store"


class OfflineStore:
    """One tenant's snapshots of every model in a store; rows have the form of the REST calls."""

    def __init__(self, uri: str, key_file: Path, tenant: str, s3: S3Options | None) -> None:
        try:
            store = open_object_store(uri, s3)
        except ValueError as error:
            raise CommandError(str(error).replace("store_uri", "--store", 1)) from error
        if isinstance(store, LocalStore) and not store.root.is_dir():
            raise CommandError(f"--store {uri}: there is no such folder")
        keyring = Keyring(read_tenant_key(key_file))
        self._namespace = keyring.namespace(check_tenant(tenant))
        # The layout matters to those who read tensors, and nothing here does.
        layout = StateLayout(kv_layers=0, kv_heads=1, head_dim=1, kv_dtype="float32")
        self._repository = Repository(TIER, store, keyring, layout)

    def rows(self, conversation_id: str | None, branch_name: str | None, limit: int) -> Iterator[dict[str, Any]]:
        """Newest first. What cannot be trusted is left out: fsck names it."""
        left = limit
        for snapshot_id, space in sorted(self._ids()):
            if left <= 0:
                return
            try:
                row = self._row(space, snapshot_id)
            except SnapshotError:
                continue
            if conversation_id in (None, row["conversation_id"]) and branch_name in (None, row["branch_name"]):
                left -= 1
                yield row

    def row(self, snapshot_id: str) -> dict[str, Any]:
        return self._row(self._space_of(snapshot_id), snapshot_id)

    def delete(self, snapshot_id: str) -> None:
        space = self._space_of(snapshot_id)
        manifest = self._repository.open_snapshot(space, snapshot_id).manifest
        commit.erase(self._repository, space, manifest)
        self._repository.write_tombstone(space, new_id(), [snapshot_id])

    def fsck(self, repair: bool) -> list[dict[str, Any]]:
        return [asdict(fsck.check(self._repository, repair=repair))]

    def close(self) -> None:
        self._repository.store.close()

    def _ids(self) -> Iterator[tuple[str, Space]]:
        """(snapshot id, space); ids in ascending order are newest first."""
        for info in self._repository.objects(f"{keys.ROOT}{self._namespace}/"):
            parsed = keys.parse(info.key)
            if parsed is not None and parsed.kind == "snap":
                yield parsed.name, parsed.space

    def _space_of(self, snapshot_id: str) -> Space:
        check_snapshot_id(snapshot_id)
        for found, space in self._ids():
            if found == snapshot_id:
                return space
        raise NotFound(f"snapshot {snapshot_id} does not exist in this store for this tenant")

    def _row(self, space: Space, snapshot_id: str) -> dict[str, Any]:
        manifest: Manifest = self._repository.open_snapshot(space, snapshot_id).manifest
        label = self._repository.read_label(space, snapshot_id)
        ref = self._repository.read_ref(space, manifest.conversation_id, manifest.branch_name)
        return {
            "id": manifest.snapshot_id,
            "object": "snapshot",
            "conversation_id": manifest.conversation_id,
            "branch_name": manifest.branch_name,
            "turn_number": manifest.turn_number,
            "boundary": manifest.boundary,
            "parent": manifest.parent_id,
            "tokens": manifest.forwarded,
            "pending": len(manifest.pending_ids),
            "bytes": manifest.nbytes,
            "tiers": [TIER],
            "created": manifest.created,
            "expires": effective_expiry(manifest.expires, label),
            "pinned": manifest.pinned if label is None or label.pinned is None else label.pinned,
            "tag": manifest.tag if label is None or label.tag is None else label.tag,
            "state_abi": manifest.state_abi,
            "is_head": ref is not None and ref.ref is not None and ref.ref.head == snapshot_id,
        }


@contextmanager
def open_store(uri: str, key_file: Path, tenant: str, s3: S3Options | None = None) -> Iterator[OfflineStore]:
    """CommandError for whatever the user can mend."""
    store = OfflineStore(uri, key_file, tenant, s3)  # raises the same
    try:
        yield store
    except SnapshotError as error:
        raise CommandError(str(error)) from error
    finally:
        store.close()
