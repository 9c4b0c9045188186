"""What the Snapshot objects of a model are, without a scan of all of them: an index that follows the cache.

Built for a namespace when it is first asked about, then moved along by each object's own reconcile. It can lag by an
event, as the cache does, so writers look at the object itself before they write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Object
from engram_operator.kube.kinds import SNAPSHOTS
from engram_operator.resources.snapshot import is_published, stored_ids

ERASED_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Handle:
    """One Snapshot object. `ids`: what it stands for in the store."""

    name: str
    uid: str
    model: str
    ids: tuple[str, ...]
    published: bool
    pinned: bool
    ready: bool
    deleting: bool


@dataclass(slots=True)
class _Space:
    handles: dict[str, Handle] = field(default_factory=dict)
    models: dict[str, dict[str, Handle]] = field(default_factory=dict)
    holders: dict[str, set[str]] = field(default_factory=dict)  # snapshot id -> names


class Handles:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._spaces: dict[str, _Space] = {}
        self._changes: dict[tuple[str, str], int] = {}
        self._erased: OrderedDict[str, None] = OrderedDict()

    def of_model(self, namespace: str, model: str) -> Mapping[str, Handle]:
        return self._space(namespace).models.get(model, {})

    def changes(self, namespace: str, model: str) -> int:
        """A number that differs after any object of the model came, changed or went."""
        return self._changes.get((namespace, model), 0)

    def holders(self, namespace: str, snapshot_id: str) -> frozenset[str]:
        """Names of the objects that stand for it."""
        return frozenset(self._space(namespace).holders.get(snapshot_id, ()))

    def get(self, namespace: str, name: str) -> Handle | None:
        return self._space(namespace).handles.get(name)

    def note(self, namespace: str, name: str) -> None:
        """Take in what the cache says of this object now."""
        space = self._space(namespace)
        obj = self._cache.get(SNAPSHOTS, namespace, name)
        before, after = space.handles.get(name), None if obj is None else handle_of(obj)
        if before == after:
            return
        for handle in (before, after):
            if handle is not None:
                key = (namespace, handle.model)
                self._changes[key] = self._changes.get(key, 0) + 1
        if before is not None:
            _take(space, before)
        if after is not None:
            _put(space, after)

    # What was deleted a moment ago may still be in an answer that is on its way

    def erase(self, snapshot_ids: Iterable[str]) -> None:
        for snapshot_id in snapshot_ids:
            self._erased[snapshot_id] = None
        while len(self._erased) > ERASED_LIMIT:
            self._erased.popitem(last=False)

    def is_erased(self, snapshot_id: str) -> bool:
        return snapshot_id in self._erased

    def _space(self, namespace: str) -> _Space:
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = _Space()
            for obj in self._cache.list(SNAPSHOTS, namespace):
                _put(space, handle_of(obj))
        return space


def handle_of(obj: Object) -> Handle:
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    return Handle(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        model=str((spec.get("modelRef") or {}).get("name")),
        ids=stored_ids(obj),
        published=is_published(obj),
        pinned=bool(spec.get("pinned")),
        ready=status.get("phase") == "Ready",
        deleting="deletionTimestamp" in metadata,
    )


def _put(space: _Space, handle: Handle) -> None:
    space.handles[handle.name] = handle
    space.models.setdefault(handle.model, {})[handle.name] = handle
    for snapshot_id in handle.ids:
        space.holders.setdefault(snapshot_id, set()).add(handle.name)


def _take(space: _Space, handle: Handle) -> None:
    del space.handles[handle.name]
    of_model = space.models[handle.model]
    del of_model[handle.name]
    if not of_model:
        del space.models[handle.model]
    for snapshot_id in handle.ids:
        names = space.holders[snapshot_id]
        names.discard(handle.name)
        if not names:
            del space.holders[snapshot_id]
