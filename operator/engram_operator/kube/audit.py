"""Whether the cache still says what the cluster says: the watches' own watchman.

kopf lists again when a watch's place in history is too old, and says nothing of objects that were deleted meanwhile:
they would stay in the cache for ever. And a watch that died looks like a quiet one. So, now and then, names and
versions are listed (metadata only) and compared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engram_operator.kube.cache import Cache, version_of
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import KubeError
from engram_operator.kube.kinds import Kind

log = logging.getLogger(__name__)

PERIOD_S = 120.0
SOON_S = 1.0
FILL_S = 0.1
RELIST_S = 10.0

Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Watch:
    """What is watched of a kind. `labels` and `fields` are selectors, "" for all."""

    kind: Kind
    labels: str = ""
    fields: str = ""


@dataclass(slots=True)
class Audit:
    """`gone(kind, object)` is told of objects that the cache had and the cluster has not; they are out of the cache
    then. `dead(kind)` is told when a change is older than a whole period and no watch showed it."""

    kube: Kube
    cache: Cache
    watches: Sequence[Watch]
    namespaces: Sequence[str | None]
    gone: Callable[[Kind, Object], None]
    dead: Callable[[Kind], None]
    period_s: float = PERIOD_S
    soon_s: float = SOON_S
    _due: set[Kind] = field(default_factory=set)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _behind: dict[Kind, dict[Name, int]] = field(default_factory=dict)

    def soon(self, kind: Kind) -> None:
        """Compare this kind in a moment: its watch began anew."""
        self._due.add(kind)
        self._wake.set()

    async def filled(self) -> None:
        """Return once the cache has, of every kind, what the cluster had when this was asked."""
        loop = asyncio.get_running_loop()
        for watch in self.watches:
            missing = True
            while missing:
                listed: dict[Name, int] = {}
                try:
                    for namespace in self.namespaces:
                        await self._versions(watch, namespace, listed)
                except KubeError as error:
                    log.warning("cannot list", extra={"kind": watch.kind.kind, "error": str(error)})
                    await asyncio.sleep(self.soon_s)
                    continue
                # What was deleted meanwhile never comes: list again after a while.
                end = loop.time() + RELIST_S
                while (missing := self._lacks(watch.kind, listed)) and loop.time() < end:
                    await asyncio.sleep(FILL_S)

    def _lacks(self, kind: Kind, listed: dict[Name, int]) -> bool:
        for name, version in listed.items():
            known = self.cache.get(kind, *name)
            if known is None or version_of(known) < version:
                return True
        return False

    async def run(self) -> None:
        """For ever. What the API server fails to list is compared a moment later."""
        loop = asyncio.get_running_loop()
        next_round = loop.time() + self.period_s
        while True:
            try:
                async with asyncio.timeout_at(next_round):
                    await self._wake.wait()
                    await asyncio.sleep(self.soon_s)
                whole = False
            except TimeoutError:
                next_round = loop.time() + self.period_s
                whole = True
            self._wake.clear()
            due, self._due = self._due, set()
            for watch in self.watches:
                if whole or watch.kind in due:
                    try:
                        await self.compare(watch, judge=whole)
                    except KubeError as error:
                        log.warning("audit failed", extra={"kind": watch.kind.kind, "error": str(error)})
                        self.soon(watch.kind)

    async def compare(self, watch: Watch, *, judge: bool) -> None:
        """One kind. `judge`: this is a regular round, so what was behind in the one before must have arrived."""
        kind = watch.kind
        listed: dict[Name, int] = {}
        shown: dict[str | None, int] = {}
        for namespace in self.namespaces:
            shown[namespace] = await self._versions(watch, namespace, listed)
        for obj in list(self.cache.list(kind)):
            metadata = obj["metadata"]
            name = metadata.get("namespace") or "", metadata["name"]
            version = shown.get(name[0], shown.get(None, 0))
            # Newer than the list: made or changed after it.
            if name not in listed and version_of(obj) <= version:
                self.cache.remove(kind, *name, uid=metadata.get("uid"))
                self.gone(kind, obj)
        behind = {}
        for name, version in listed.items():
            known = self.cache.get(kind, *name)
            if known is None or version_of(known) < version:
                behind[name] = version
        if judge:
            for name, version in self._behind.get(kind, {}).items():
                if name in behind and behind[name] >= version:
                    known = self.cache.get(kind, *name)
                    if known is None or version_of(known) < version:
                        self.dead(kind)
                        break
            self._behind[kind] = behind

    async def _versions(self, watch: Watch, namespace: str | None, into: dict[Name, int]) -> int:
        """Fill in versions by name; returns the version of the whole list."""
        items, version = await self.kube.list_at(
            watch.kind, namespace, labels=watch.labels or None, fields=watch.fields or None, names_only=True
        )
        for item in items:
            metadata = item["metadata"]
            into[metadata.get("namespace") or "", metadata["name"]] = version_of(item)
        return int(version) if version.isdigit() else 0
