"""Snapshots of a store without a server: for a machine, or a Job, that only has the store and the key.

Needs no model: manifests say what they are. A server that uses the store meanwhile learns of deletions by the same
records it gets from its peers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_runtime.cli.lazy import CommandError
from engram_runtime.cli.snapshots import Deletion
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
from engram_runtime.snapshots.policy.records import MAX_TOMBSTONE_IDS, effective_expiry
from engram_runtime.snapshots.service import SnapshotService
from engram_runtime.snapshots.service import open_store as open_object_store
from engram_runtime.snapshots.types import SnapshotConfig, StateLayout, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

TIER = "store"
# The layout matters to those who read tensors, and nothing here does.
LAYOUT = StateLayout(kv_layers=0, kv_heads=1, head_dim=1, kv_dtype="float32")
# Of whatever model: without states, anchors of what is swept would be given to snapshots that may lack a state there.
ANY_LAYOUT = StateLayout(0, 1, 1, "float32", {"any": TensorSpec((1,), "uint8")})


class OfflineStore:
    """One tenant's snapshots of every model in a store, or (None) everybody's; rows have the form of the REST calls."""

    def __init__(self, uri: str, key_file: Path, tenant: str | None, s3: S3Options | None) -> None:
        try:
            store = open_object_store(uri, s3)
        except ValueError as error:
            raise CommandError(str(error).replace("store_uri", "--store", 1)) from error
        if isinstance(store, LocalStore) and not store.root.is_dir():
            raise CommandError(f"--store {uri}: there is no such folder")
        self._uri = uri
        self._s3 = s3
        self._key = read_tenant_key(key_file)
        keyring = Keyring(self._key)
        self._namespace = None if tenant is None else keyring.namespace(check_tenant(tenant))
        self._repository = Repository(TIER, store, keyring, LAYOUT)

    def rows(self, conversation_id: str | None, branch_name: str | None, limit: int) -> Iterator[dict[str, Any]]:
        """Newest first. What cannot be trusted is left out: fsck names it."""
        left = limit
        for snapshot_id, space in sorted(self._ids(), key=lambda item: item[0]):
            if left <= 0:
                return
            try:
                row = self._row(space, snapshot_id)
            except SnapshotError:
                continue
            if conversation_id in (None, row["conversation_id"]) and branch_name in (None, row["branch_name"]):
                left -= 1
                yield row if self._namespace is not None else self._hidden(space, row)

    def row(self, snapshot_id: str) -> dict[str, Any]:
        space, manifest = self._find(snapshot_id, list(self._spaces()))
        return self._row(space, manifest.snapshot_id)

    def delete(self, snapshot_ids: Sequence[str]) -> list[Deletion]:
        """One record tells the other replicas of all that went from a tenant."""
        for snapshot_id in snapshot_ids:
            check_snapshot_id(snapshot_id)
        spaces = list(self._spaces())
        results: list[Deletion] = []
        gone: dict[Space, list[str]] = {}
        for snapshot_id in snapshot_ids:
            try:
                space, manifest = self._find(snapshot_id, spaces)
                commit.erase(self._repository, space, manifest)
                gone.setdefault(space, []).append(snapshot_id)
                results.append(Deletion(snapshot_id, True))
            except NotFound:
                results.append(Deletion(snapshot_id, False))
            except SnapshotError as error:
                results.append(Deletion(snapshot_id, False, str(error)))
        for space, deleted in gone.items():
            for first in range(0, len(deleted), MAX_TOMBSTONE_IDS):
                self._repository.write_tombstone(space, new_id(), deleted[first : first + MAX_TOMBSTONE_IDS])
        return results

    def sweep(self, options: argparse.Namespace) -> dict[str, Any]:
        """As a server's sweep of its store. SnapshotError when the store cannot be read or written."""
        config = SnapshotConfig(
            tenant_key=self._key,
            host_bytes=0,
            store_uri=self._uri,
            s3=self._s3,
            keep_last=options.retention_keep_last,
            max_age_seconds=options.retention_max_age or None,
            max_conversations=options.retention_max_conversations,
            max_total_bytes=options.retention_max_total_size,
            gc_interval_seconds=0,
        )
        service = SnapshotService(config, state_abi="0" * 64, layout=ANY_LAYOUT, transfer=_NoDevice())
        try:
            report = service.sweep_store()
        finally:
            service.close()
        return asdict(report)

    def fsck(self, repair: bool) -> list[dict[str, Any]]:
        return [asdict(fsck.check(self._repository, repair=repair))]

    def close(self) -> None:
        self._repository.store.close()

    def _spaces(self) -> Iterator[Space]:
        """By leaps: one request for each tenant and model, however much there is of them."""
        root = keys.ROOT if self._namespace is None else f"{keys.ROOT}{self._namespace}/"
        after: str | None = None
        while page := self._repository.store.list(root, after=after, limit=1):
            key = page[0].key
            parsed = keys.parse(key)
            if parsed is None:
                after = key  # not ours: a step at a time
            else:
                yield parsed.space
                after = f"{parsed.space.prefix[:-1]}0"  # "0" is the character after "/"

    def _ids(self) -> Iterator[tuple[str, Space]]:
        """(snapshot id, space); ids in ascending order are newest first."""
        for space in self._spaces():
            for info in self._repository.objects(space.snapshots()):
                parsed = keys.parse(info.key)
                if parsed is not None:
                    yield parsed.name, space

    def _find(self, snapshot_id: str, spaces: Sequence[Space]) -> tuple[Space, Manifest]:
        check_snapshot_id(snapshot_id)
        for space in spaces:
            with suppress(NotFound):
                return space, self._repository.open_snapshot(space, snapshot_id).manifest
        whose = "" if self._namespace is None else " for this tenant"
        raise NotFound(f"snapshot {snapshot_id} does not exist in this store{whose}")

    def _hidden(self, space: Space, row: dict[str, Any]) -> dict[str, Any]:
        signer = self._repository.signer(space)
        return {
            **row,
            "tenant": space.namespace,
            "conversation_id": signer.hide("conversation", row["conversation_id"]),
            "branch_name": signer.hide("branch", row["branch_name"]),
        }

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


class _NoDevice:
    """A KVTransfer for a service that neither saves nor restores."""

    def read_kv(self, block_ids: Sequence[int], first: int, count: int) -> Tensor:
        raise SnapshotError("there is no device here")

    def read_state(self, slot: int) -> dict[str, Tensor]:
        raise SnapshotError("there is no device here")

    def write(
        self,
        block_ids: Sequence[int],
        kv: Sequence[tuple[int, Tensor]],
        state_slot: int | None,
        state: dict[str, Tensor],
    ) -> int:
        raise SnapshotError("there is no device here")

    def settle(self) -> None:
        """Nothing was written."""


@contextmanager
def open_store(uri: str, key_file: Path, tenant: str | None, s3: S3Options | None = None) -> Iterator[OfflineStore]:
    """CommandError for whatever the user can mend."""
    store = OfflineStore(uri, key_file, tenant, s3)  # raises the same
    try:
        yield store
    except SnapshotError as error:
        raise CommandError(str(error)) from error
    finally:
        store.close()
