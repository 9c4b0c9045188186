"""Writes of Snapshot objects, and what they came to before any watch tells of it.

A controller that looks again before the event of its own write has arrived would see yesterday's object, and take a
snapshot twice. So what was written is remembered until the cache has caught up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from engram_operator.kube.cache import Cache, version_of
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import Conflict, NotFound
from engram_operator.kube.kinds import SNAPSHOTS
from engram_operator.resources.snapshot import ABANDON, FINALIZER

REMEMBERED = 4096


class SnapshotWrites:
    def __init__(self, kube: Kube, cache: Cache) -> None:
        self._kube = kube
        self._cache = cache
        self._written: OrderedDict[str, Object] = OrderedDict()

    def get(self, namespace: str, name: str) -> Object | None:
        """The object as the cache has it, or as it was written, whichever is newer. Not to be changed."""
        obj = self._cache.get(SNAPSHOTS, namespace, name)
        if obj is None:
            return None
        written = self._written.get(obj["metadata"].get("uid", ""))
        if written is None:
            return obj
        if version_of(written) > version_of(obj):
            return written
        del self._written[obj["metadata"]["uid"]]
        return obj

    async def status(self, obj: Object, status: Mapping[str, Any]) -> bool:
        """Write it where it differs. False when the object is gone, or another has its name."""
        if status == (obj.get("status") or {}):
            return True
        metadata = obj["metadata"]
        try:
            written = await self._kube.apply_status(
                SNAPSHOTS, metadata["name"], metadata["namespace"], dict(status), uid=metadata["uid"]
            )
        except (NotFound, Conflict):
            return False
        self._remember(written)
        return True

    async def finalizers(self, obj: Object, *, hold: bool, annotations: Mapping[str, str] | None = None) -> bool:
        """Put our finalizer on or take it off. False: somebody else was faster, so look again."""
        metadata = obj["metadata"]
        others = [entry for entry in metadata.get("finalizers") or () if entry != FINALIZER]
        patch: dict[str, Any] = {
            "finalizers": [*others, FINALIZER] if hold else others,
            "resourceVersion": metadata["resourceVersion"],
        }
        if annotations:
            patch["annotations"] = dict(annotations)
        try:
            written = await self._kube.merge_patch(
                SNAPSHOTS, metadata["name"], metadata["namespace"], {"metadata": patch}
            )
        except NotFound:
            return True
        except Conflict:
            return False
        self._remember(written)
        return True

    async def take_out_of_view(self, obj: Object) -> bool:
        """Delete a published object and leave its bytes alone. Marked first, so that whoever sees it between the two
        writes never takes it for a user's deletion. False: it was changed meanwhile, it may have been pinned."""
        if not await self.finalizers(obj, hold=False, annotations={ABANDON: "true"}):
            return False
        metadata = obj["metadata"]
        await self._kube.delete(SNAPSHOTS, metadata["name"], metadata["namespace"], uid=metadata["uid"])
        return True

    def _remember(self, obj: Object) -> None:
        uid = obj["metadata"].get("uid", "")
        self._written.pop(uid, None)
        self._written[uid] = obj
        while len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
