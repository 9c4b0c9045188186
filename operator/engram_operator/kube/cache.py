"""What the cluster looked like at the last event: the operator's only memory, and it may be lost at any time.

Watches fill it, controllers read it. Objects are stored without the parts that no controller reads, and equal keys
and short strings are shared: 5,000 Snapshots must fit into a small pod.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engram_operator.kube.kinds import PODS, Kind

Object = dict[str, Any]
Objects = list[Object]  # inside the class, `list` is a method

DROPPED_METADATA = frozenset({"managedFields", "selfLink"})
DROPPED_ANNOTATIONS = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})
# Of a pod's spec; its status is kept whole. A pod is compared with nothing: its StatefulSet is.
KEPT_POD_SPEC = frozenset({"nodeName", "terminationGracePeriodSeconds", "volumes", "priorityClassName"})
KEPT_CONTAINER = frozenset({"name", "image", "resources"})
SHARED_STRING = 64  # longer ones are rarely equal


@dataclass(slots=True)
class Cache:
    """Objects by kind, namespace and name. What it returns belongs to the cache: never change it."""

    _objects: dict[Kind, dict[str, dict[str, Object]]] = field(default_factory=dict)
    _owned: dict[tuple[Kind, str], dict[str, Object]] = field(default_factory=dict)

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._objects.get(kind, {}).get(namespace, {}).get(name)

    def list(self, kind: Kind, namespace: str | None = None) -> Objects:
        """All objects of a kind, in one namespace or in all that are watched."""
        spaces = self._objects.get(kind, {})
        if namespace is not None:
            return list(spaces.get(namespace, {}).values())
        return [obj for names in spaces.values() for obj in names.values()]

    def owned(self, kind: Kind, namespace: str, owner_uid: str) -> Objects:
        """Objects that name this owner, as controller or not."""
        found = self._owned.get((kind, owner_uid), {}).values()
        return [obj for obj in found if obj["metadata"].get("namespace") == namespace]

    def labelled(self, kind: Kind, namespace: str, labels: Mapping[str, str]) -> Objects:
        """Objects that carry all these labels."""
        wanted = labels.items()
        return [
            obj
            for obj in self._objects.get(kind, {}).get(namespace, {}).values()
            if wanted <= (obj["metadata"].get("labels") or {}).items()
        ]

    # For the watches

    def put(self, kind: Kind, obj: Mapping[str, Any]) -> Object | None:
        """Take in an object as the server sent it; returns what was known of it before.

        What is older than the known one is not taken in: events of an object and of the one that had its name before
        come in any order.
        """
        kept = slim(kind, obj)
        metadata = kept["metadata"]
        namespace, name = metadata.get("namespace") or "", metadata["name"]
        known = self.get(kind, namespace, name)
        if known is not None and version_of(known) > version_of(kept):
            return known
        before = self.remove(kind, namespace, name)
        self._objects.setdefault(kind, {}).setdefault(namespace, {})[name] = kept
        for uid in _owners(kept):
            self._owned.setdefault((kind, uid), {})[metadata["uid"]] = kept
        return before

    def remove(self, kind: Kind, namespace: str, name: str, uid: str | None = None) -> Object | None:
        """Forget an object; returns what was known of it. With `uid`, only if the name still belongs to that one."""
        spaces = self._objects.get(kind, {})
        before = spaces.get(namespace, {}).get(name)
        if before is None or (uid is not None and before["metadata"].get("uid") != uid):
            return None
        del spaces[namespace][name]
        if not spaces[namespace]:
            del spaces[namespace]
        for uid in _owners(before):
            entries = self._owned[(kind, uid)]
            entries.pop(before["metadata"]["uid"], None)
            if not entries:
                del self._owned[(kind, uid)]
        return before

    def counts(self) -> Mapping[Kind, int]:
        return {kind: sum(map(len, spaces.values())) for kind, spaces in self._objects.items()}


def version_of(obj: Mapping[str, Any]) -> int:
    """The resourceVersion as a number, which the API promises it is; 0 when it has none."""
    version = obj["metadata"].get("resourceVersion") or ""
    return int(version) if version.isdigit() else 0


def _owners(obj: Object) -> Iterator[str]:
    for reference in obj["metadata"].get("ownerReferences") or ():
        yield reference["uid"]


def slim(kind: Kind, obj: Mapping[str, Any]) -> Object:
    """A copy with only what controllers read of this kind, equal strings shared."""
    kept: Object = {"apiVersion": kind.api_version, "kind": kind.kind}
    for key, value in obj.items():
        if key == "metadata":
            kept["metadata"] = _shared({k: v for k, v in value.items() if k not in DROPPED_METADATA})
            annotations = kept["metadata"].get("annotations")
            if annotations and not DROPPED_ANNOTATIONS.isdisjoint(annotations):
                left = {k: v for k, v in annotations.items() if k not in DROPPED_ANNOTATIONS}
                kept["metadata"]["annotations"] = left
        elif key == "spec" and kind == PODS:
            spec = {k: v for k, v in value.items() if k in KEPT_POD_SPEC}
            for group in ("initContainers", "containers"):
                spec[group] = [{k: v for k, v in c.items() if k in KEPT_CONTAINER} for c in value.get(group) or ()]
            kept["spec"] = _shared(spec)
        elif key not in ("apiVersion", "kind"):
            kept[sys.intern(key)] = _shared(value)
    kept.setdefault("metadata", {})
    return kept


def _shared(value: Any) -> Any:
    """A deep copy of decoded JSON whose keys and short strings are interned."""
    if isinstance(value, Mapping):
        return {sys.intern(str(key)): _shared(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shared(item) for item in value]
    if isinstance(value, str) and len(value) <= SHARED_STRING:
        return sys.intern(str(value))
    return value
