"""Reads what a repository holds, as facts for retention, quota and fsck."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.io.repository import Repository
from engram_runtime.snapshots.io.store import ObjectInfo, StoreUnavailable
from engram_runtime.snapshots.policy import keys
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest
from engram_runtime.snapshots.policy.records import Label, effective_expiry
from engram_runtime.snapshots.policy.retention import SnapshotFacts


@dataclass(slots=True)
class Inventory:
    """Everything below the root, by kind. Keys are (space, name)."""

    snapshots: dict[tuple[Space, str], ObjectInfo] = field(default_factory=dict)
    kv: dict[tuple[Space, str], ObjectInfo] = field(default_factory=dict)
    labels: dict[tuple[Space, str], ObjectInfo] = field(default_factory=dict)
    other: dict[str, list[tuple[Space, str, ObjectInfo]]] = field(default_factory=dict)
    unknown: list[ObjectInfo] = field(default_factory=list)
    nbytes: int = 0


class ManifestCache:
    """Manifests never change under an id (but for their branch), so each is read once. Bounded."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._known: dict[tuple[Space, str], Manifest] = {}

    def read(self, repository: Repository, space: Space, snapshot_id: str) -> Manifest:
        found = self._known.get((space, snapshot_id))
        if found is None:
            found = repository.open_snapshot(space, snapshot_id).manifest
            if len(self._known) >= self._limit:
                self._known.clear()
            self._known[space, snapshot_id] = found
        return found

    def forget(self, space: Space, snapshot_id: str) -> None:
        self._known.pop((space, snapshot_id), None)


def take(objects: Iterable[ObjectInfo]) -> Inventory:
    """Sort a listing by kind."""
    inventory = Inventory()
    for info in objects:
        inventory.nbytes += info.size
        parsed = keys.parse(info.key)
        if parsed is None:
            inventory.unknown.append(info)
        elif parsed.kind == "snap":
            inventory.snapshots[parsed.space, parsed.name] = info
        elif parsed.kind == "kv":
            inventory.kv[parsed.space, parsed.name] = info
        elif parsed.kind == "label":
            inventory.labels[parsed.space, parsed.name] = info
        else:
            inventory.other.setdefault(parsed.kind, []).append((parsed.space, parsed.name, info))
    return inventory


def manifests(repository: Repository, inventory: Inventory, cache: ManifestCache) -> dict[tuple[Space, str], Manifest]:
    """Of every snapshot that can be read and trusted. StoreUnavailable passes: half a picture must delete nothing."""
    found = {}
    for space, snapshot_id in inventory.snapshots:
        try:
            found[space, snapshot_id] = cache.read(repository, space, snapshot_id)
        except StoreUnavailable:
            raise
        except SnapshotError:
            continue
    return found


def facts(
    repository: Repository, inventory: Inventory, known: Mapping[tuple[Space, str], Manifest], protected: Iterable[str]
) -> dict[str, tuple[Space, SnapshotFacts]]:
    """Retention's view. A label that cannot be trusted counts as a pin: deleting needs certainty, keeping does not."""
    keep = set(protected)
    result = {}
    for (space, snapshot_id), manifest in known.items():
        label: Label | None = None
        pinned = manifest.pinned or snapshot_id in keep
        if (space, snapshot_id) in inventory.labels:
            try:
                label = repository.read_label(space, snapshot_id)
            except StoreUnavailable:
                raise
            except NotFound:
                label = None
            except SnapshotError:
                pinned = True
        if label is not None and label.pinned is not None:
            pinned = label.pinned or snapshot_id in keep
        info = inventory.snapshots[space, snapshot_id]
        sizes = {
            f"{space.prefix}{file}": inventory.kv[space, file].size
            for file in manifest.files()
            if (space, file) in inventory.kv
        }
        result[snapshot_id] = (
            space,
            SnapshotFacts(
                snapshot_id=snapshot_id,
                parent_id=manifest.parent_id,
                conversation=f"{space.prefix}{manifest.conversation_id}",
                branch=manifest.branch_name,
                turn_number=manifest.turn_number,
                created=manifest.created,
                last_used=info.modified,
                expires=effective_expiry(manifest.expires, label),
                pinned=pinned,
                nbytes=info.size,
                files=sizes,
            ),
        )
    return result


def foreign(inventory: Inventory, known: Mapping[tuple[Space, str], Manifest]) -> set[str]:
    """Namespaces that hold snapshots, none of which the key here can vouch for: they belong to another key.

    A store may be shared by several keys, and somebody may have started with the wrong one: what cannot be judged must
    be left alone.
    """
    return {space.namespace for space, _ in inventory.snapshots} - {space.namespace for space, _ in known}


def unreferenced(
    inventory: Inventory, known: Mapping[tuple[Space, str], Manifest]
) -> dict[tuple[Space, str], ObjectInfo]:
    """KV files that no snapshot needs."""
    needed = {(space, file) for (space, _), manifest in known.items() for file in manifest.files()}
    return {key: info for key, info in inventory.kv.items() if key not in needed}
