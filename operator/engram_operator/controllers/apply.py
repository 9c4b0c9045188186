"""Writes of children: only where something differs, and never over what belongs to somebody else.

A child is as it should be when it was made from the same input (a hash in an annotation says so) and when the live
object still carries every field of ours. The first catches a field that we no longer set, the second an edit by others.
What others add beside our fields stays.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engram_operator.builders.naming import MANAGER
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object, fingerprint
from engram_operator.kube.errors import Invalid
from engram_operator.kube.kinds import Kind, kind_of
from engram_operator.resources.quantity import parse_quantity

APPLIED = "engram.dev/applied"
REFUSED_SECONDS = 300.0
_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
# Maps of one piece: a label added to a selector is another selector.
_WHOLE = frozenset({"selector", "nodeSelector", "podSelector", "namespaceSelector", "labelSelector"})
_QUANTITIES = frozenset({"requests", "limits"})


class NameTaken(Exception):
    """An object of this name is somebody else's; writing it would take it away from them."""

    def __init__(self, kind: Kind, name: str, holder: str) -> None:
        self.message = f'{kind.kind} "{name}" exists and belongs to {holder}: rename the model, or delete that object'
        super().__init__(self.message)


class StillGoing(Exception):
    """The object of a deleted predecessor has not gone yet: come back in a moment."""


class Applier:
    """Brings children to what they should be."""

    def __init__(self, kube: Kube, cache: Cache) -> None:
        self._kube = kube
        self._cache = cache
        # What the server made of objects that it keeps in another form than they were sent: applying those again
        # would change nothing, for ever. By kind, namespace and name: the hash of ours, and of theirs.
        self._settled: dict[tuple[Kind, str, str], tuple[str, str]] = {}
        self._refused: dict[tuple[Kind, str, str], tuple[str, float, Invalid]] = {}

    def live(self, obj: Mapping[str, Any]) -> Object | None:
        metadata = obj["metadata"]
        return self._cache.get(kind_of(obj), metadata["namespace"], metadata["name"])

    def differs(self, obj: Mapping[str, Any]) -> bool:
        """Whether `ensure` would write."""
        live = self.live(obj)
        if live is None:
            return True
        if in_force(obj, live):
            return False
        settled = self._settled.get(_place(obj))
        return settled is None or settled != (fingerprint(dict(obj)), _shape(live))

    async def check(self, obj: Object) -> None:
        """Have the API server judge the object without storing it. Invalid and Forbidden say what is wrong.

        What it found invalid is not shown to it again for a while: only another object can be better.
        """
        if not self.differs(obj):
            return
        place, content, now = _place(obj), fingerprint(obj["spec"]), asyncio.get_running_loop().time()
        known = self._refused.pop(place, None)
        if known is not None and known[0] == content and now - known[1] < REFUSED_SECONDS:
            self._refused[place] = known
            raise known[2]
        await self._claim(obj)
        try:
            await self._kube.apply(stamped(obj), dry_run=True)
        except Invalid as error:
            self._refused[place] = (content, now, error)
            raise

    async def ensure(self, obj: Object) -> bool:
        """Apply where it differs; True when something was written. NameTaken and StillGoing say why it cannot be."""
        if not self.differs(obj):
            return False
        await self._claim(obj)
        result = await self._kube.apply(stamped(obj))
        if in_force(obj, result):
            self._settled.pop(_place(obj), None)
        else:
            self._settled[_place(obj)] = (fingerprint(dict(obj)), _shape(result))
        return True

    async def ensure_unwatched(self, obj: Object) -> bool:
        """`ensure` for a kind that no watch follows: the live object is read."""
        live = await self._kube.get(kind_of(obj), obj["metadata"]["name"], obj["metadata"]["namespace"])
        if live is not None and in_force(obj, live):
            return False
        _claim_from(obj, live)
        await self._kube.apply(stamped(obj))
        return True

    async def _claim(self, obj: Object) -> None:
        """The name is free or ours. The cache holds only what carries our label, so absence there proves nothing."""
        metadata = obj["metadata"]
        _claim_from(obj, self.live(obj) or await self._kube.get(kind_of(obj), metadata["name"], metadata["namespace"]))

    async def remove_others(self, kinds: Iterable[Kind], namespace: str, uid: str, keep: Iterable[Object]) -> None:
        """Delete the children of these kinds that should not exist any more."""
        kept = {(kind_of(obj), obj["metadata"]["name"]) for obj in keep}
        for kind in kinds:
            for obj in self._cache.owned(kind, namespace, uid):
                metadata = obj["metadata"]
                ours = any(r["uid"] == uid and r.get("controller") for r in metadata.get("ownerReferences") or ())
                if ours and (kind, metadata["name"]) not in kept and not metadata.get("deletionTimestamp"):
                    await self._kube.delete(kind, metadata["name"], namespace, uid=metadata["uid"])


def _claim_from(obj: Object, live: Object | None) -> None:
    """NameTaken when `live` is somebody else's, StillGoing when it is about to go."""
    if live is None:
        return
    kind, metadata = kind_of(obj), obj["metadata"]
    wanted = {reference["uid"] for reference in metadata.get("ownerReferences") or ()}
    owners = live["metadata"].get("ownerReferences") or []
    controller = next((reference for reference in owners if reference.get("controller")), None)
    if controller is not None and controller["uid"] not in wanted:
        if controller.get("kind") == "EngramModel" and controller["name"] in _owner_names(obj):
            raise StillGoing
        raise NameTaken(kind, metadata["name"], f'{controller.get("kind")} "{controller["name"]}"')
    managed = (live["metadata"].get("labels") or {}).get("app.kubernetes.io/managed-by") == MANAGER
    if controller is None and not managed:
        raise NameTaken(kind, metadata["name"], "somebody else")
    if live["metadata"].get("deletionTimestamp"):
        raise StillGoing


def _owner_names(obj: Mapping[str, Any]) -> set[str]:
    return {str(reference["name"]) for reference in obj["metadata"].get("ownerReferences") or ()}


def _place(obj: Mapping[str, Any]) -> tuple[Kind, str, str]:
    return kind_of(obj), str(obj["metadata"]["namespace"]), str(obj["metadata"]["name"])


def _shape(live: Mapping[str, Any]) -> str:
    """Hash of what a user may write of an object."""
    metadata = {key: live["metadata"].get(key) for key in ("uid", "labels", "annotations", "ownerReferences")}
    return fingerprint({**{k: v for k, v in live.items() if k != "status"}, "metadata": metadata})


def stamped(obj: Mapping[str, Any]) -> Object:
    """The object with the hash of itself among its annotations."""
    result = copy.deepcopy(dict(obj))
    annotations = result["metadata"].setdefault("annotations", {})
    annotations[APPLIED] = fingerprint(dict(obj))
    return result


def in_force(obj: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether the live object was made from this one and still carries all of it."""
    annotations = live["metadata"].get("annotations") or {}
    return annotations.get(APPLIED) == fingerprint(dict(obj)) and carries(live, obj)


def carries(live: Any, ours: Any, field: str = "", parent: str = "") -> bool:
    """Whether every field of ours is in `live` with our value. An API server leaves out what is empty or false."""
    if live is None:
        return not ours
    if isinstance(ours, Mapping):
        if not isinstance(live, Mapping) or (field in _WHOLE and set(live) != set(ours)):
            return False
        # What is inside a map of one piece is of one piece too: matchLabels.
        inside = field if field in _WHOLE and field != "nodeSelector" else ""
        return all(carries(live.get(key), value, inside or str(key), field) for key, value in ours.items())
    if isinstance(ours, Sequence) and not isinstance(ours, str):
        if not isinstance(live, Sequence) or isinstance(live, str):
            return False
        return _carries_list(live, ours, field)
    if live == ours:
        return True
    return (parent in _QUANTITIES or field in ("sizeLimit", "storage")) and _same_quantity(live, ours)


def _carries_list(live: Sequence[Any], ours: Sequence[Any], field: str) -> bool:
    keys = _list_keys(ours, field)
    if keys is None:
        return len(live) == len(ours) and all(carries(a, b) for a, b in zip(live, ours, strict=True))
    found = {tuple(item.get(key) for key in keys): item for item in live if isinstance(item, Mapping)}
    return all(carries(found.get(tuple(item.get(key) for key in keys)), item) for item in ours)


def _list_keys(ours: Sequence[Any], field: str) -> tuple[str, ...] | None:
    """The fields that name an item of this list; None for a list that is one value."""
    if field == "ports" and ours:
        return ("containerPort",) if "containerPort" in ours[0] else ("port",) if "port" in ours[0] else None
    return _KEYS.get(field)


def _same_quantity(live: Any, ours: Any) -> bool:
    try:
        return parse_quantity(live) == parse_quantity(ours)
    except ValueError:
        return False
