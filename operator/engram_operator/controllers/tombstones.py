"""Snapshots that stay in the store and out of view: their object was deleted under Retain.

Kept in the policy's status, because the operator's memory ends with it. Bounded: only what is young enough to be
published again needs to be remembered, the publisher says which that is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube
from engram_operator.kube.errors import Conflict, NotFound
from engram_operator.kube.kinds import POLICIES

LIMIT = 5000


class Tombstones:
    def __init__(self, kube: Kube, cache: Cache) -> None:
        self._kube = kube
        self._cache = cache
        self._kept: dict[tuple[str, str], dict[tuple[str, str], None]] = {}  # by policy: (model, snapshot id)

    def of_model(self, namespace: str, policy: str, model: str) -> frozenset[str]:
        return frozenset(snapshot_id for name, snapshot_id in self._of(namespace, policy) if name == model)

    def listed(self, namespace: str, policy: str) -> list[dict[str, str]]:
        """As the policy's status has them."""
        return [{"modelName": model, "snapshotID": found} for model, found in self._of(namespace, policy)]

    async def add(self, namespace: str, policy: str, model: str, snapshot_ids: Iterable[str]) -> bool:
        """Written when this returns True; False: the policy changed meanwhile, ask again. A policy that is gone
        publishes nothing, so then there is nothing to remember."""
        obj = self._cache.get(POLICIES, namespace, policy)
        if obj is None:
            return True
        kept = self._of(namespace, policy)
        new = [(model, found) for found in snapshot_ids if (model, found) not in kept]
        if not new:
            return True
        for entry in new:
            kept[entry] = None
        while len(kept) > LIMIT:
            del kept[next(iter(kept))]
        status: dict[str, Any] = {**(obj.get("status") or {}), "unpublished": self.listed(namespace, policy)}
        try:
            await self._kube.apply_status(POLICIES, policy, namespace, status, uid=obj["metadata"]["uid"])
        except NotFound:
            return True
        except Conflict:
            return False
        return True

    def keep_only(self, namespace: str, policy: str, model: str, window: Collection[str]) -> None:
        """Forget those of a model that cannot be published again; the policy's next status no longer has them."""
        kept = self._of(namespace, policy)
        for entry in [entry for entry in kept if entry[0] == model and entry[1] not in window]:
            del kept[entry]

    def _of(self, namespace: str, policy: str) -> dict[tuple[str, str], None]:
        key = (namespace, policy)
        if key not in self._kept:
            obj = self._cache.get(POLICIES, namespace, policy)
            if obj is None:
                return {}
            listed = (obj.get("status") or {}).get("unpublished") or ()
            self._kept[key] = {(entry["modelName"], entry["snapshotID"]): None for entry in listed}
        return self._kept[key]

    def forget(self, namespace: str, policy: str) -> None:
        self._kept.pop((namespace, policy), None)
