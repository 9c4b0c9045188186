"""Server-side apply as an API server does it, on plain dictionaries: owned fields are set, dropped ones taken away.

Covers what an operator relies on: ownership by manager, lists that are maps or sets, conflicts always forced. Not
covered: that another client's update takes ownership, and lists outside the table, which are replaced as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[Any, ...]  # of field names and Item
SETS = frozenset({"finalizers"})
KEYS: dict[str, tuple[tuple[str, ...], ...]] = {  # the first set of keys that an item has decides
    "conditions": (("type",),),
    "containers": (("name",),),
    "initContainers": (("name",),),
    "env": (("name",),),
    "volumes": (("name",),),
    "volumeMounts": (("mountPath",),),
    "imagePullSecrets": (("name",),),
    "ownerReferences": (("uid",),),
    "ports": (("containerPort", "protocol"), ("port", "protocol")),
    "topologySpreadConstraints": (("topologyKey", "whenUnsatisfiable"),),
}
ATOMIC = frozenset(
    {"selector", "nodeSelector", "podSelector", "namespaceSelector", "labelSelector"}
)  # maps of one piece
DEFAULTED = {"protocol": "TCP"}
UNOWNED = frozenset({"apiVersion", "kind"})
UNOWNED_METADATA = frozenset({"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp"})


class Item(tuple[Any, ...]):
    """One step of a path into a list: the values of the item's keys."""

    __slots__ = ()


def apply(live: dict[str, Any], applied: Mapping[str, Any], mine: set[Path], others: set[Path]) -> set[Path]:
    """Change `live` in place as server-side apply does. `mine` are the paths this manager applied before, `others`
    those that other managers own. Returns the paths that the manager owns now."""
    owned = set(_leaves(applied, ()))
    for path in sorted(mine - owned - others, key=len, reverse=True):
        _remove(live, path)
    _merge(live, applied, "")
    return owned


def _keys(name: str, items: list[Any]) -> tuple[str, ...] | None:
    """The keys by which this list is a map, None when it is replaced as a whole."""
    for keys in KEYS.get(name, ()):
        if all(isinstance(item, Mapping) and keys[0] in item for item in items):
            return keys
    return None


def _identity(item: Mapping[str, Any], keys: tuple[str, ...]) -> Item:
    return Item(item.get(key, DEFAULTED.get(key)) for key in keys)


def _leaves(value: Any, path: Path) -> Iterator[Path]:
    name = path[-1] if path and not isinstance(path[-1], Item) else ""
    if isinstance(value, Mapping) and value and name not in ATOMIC:
        if path and isinstance(path[-1], Item):
            yield path  # the item itself: an item nobody owns goes
        for key, child in value.items():
            if (not path and key in UNOWNED) or (path == ("metadata",) and key in UNOWNED_METADATA):
                continue
            yield from _leaves(child, (*path, key))
    elif isinstance(value, list) and name in SETS:
        for child in value:
            yield (*path, Item((child,)))
    elif isinstance(value, list) and value and (keys := _keys(name, value)):
        for child in value:
            yield from _leaves(child, (*path, _identity(child, keys)))
    else:
        yield path


def _find(items: list[Any], name: str, identity: Item) -> int | None:
    for index, item in enumerate(items):
        if item == identity[0] if name in SETS else _identity(item, _keys(name, items) or ()) == identity:
            return index
    return None


def _remove(live: dict[str, Any], path: Path) -> None:
    """Take one owned path away, and the maps that this leaves empty."""
    trail: list[tuple[Any, Any]] = []
    at: Any = live
    for number, step in enumerate(path):
        if isinstance(step, Item):
            index = _find(at, path[number - 1], step) if isinstance(at, list) else None
            if index is None:
                return
            step = index
        elif not isinstance(at, dict) or step not in at:
            return
        trail.append((at, step))
        at = at[step]
    del trail[-1][0][trail[-1][1]]
    for holder, step in reversed(trail[:-1]):
        if holder[step] in ({}, []) and not isinstance(holder, list):
            del holder[step]
        else:
            return


def _merge(live: dict[str, Any], applied: Mapping[str, Any], name: str) -> None:
    for key, value in applied.items():
        old = live.get(key)
        if isinstance(value, Mapping) and isinstance(old, dict) and key not in ATOMIC:
            _merge(old, value, key)
        elif isinstance(value, list) and isinstance(old, list):
            live[key] = _merged_list(old, value, key)
        elif value is None:
            live.pop(key, None)
        else:
            live[key] = copy.deepcopy(value)


def _merged_list(old: list[Any], new: list[Any], name: str) -> list[Any]:
    if name in SETS:
        return [*old, *(item for item in new if item not in old)]
    keys = _keys(name, [*old, *new])
    if keys is None:
        return copy.deepcopy(new)
    merged = list(old)
    for item in new:
        index = _find(merged, name, _identity(item, keys))
        if index is None:
            merged.append(copy.deepcopy(item))
        else:
            _merge(merged[index], item, name)
    return merged


def merge_patch(live: dict[str, Any], patch: Mapping[str, Any]) -> None:
    """RFC 7386 in place: null removes, maps merge, everything else replaces."""
    for key, value in patch.items():
        if value is None:
            live.pop(key, None)
        elif isinstance(value, Mapping):
            if not isinstance(live.get(key), dict):
                live[key] = {}
            merge_patch(live[key], value)
        else:
            live[key] = copy.deepcopy(value)
