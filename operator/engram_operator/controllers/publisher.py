"""Which stored snapshots also have an object: a bounded, newest-first view, kept by following one engine per model.

The store is the record. Nothing new in it costs one small request now and then, and no write; a new turn costs two
writes. What users made or pinned never counts out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from engram_operator.controllers.asking import PAGE, AsksSnapshots
from engram_operator.controllers.handles import Handles
from engram_operator.controllers.ledger import Ledger
from engram_operator.controllers.published import PublishedObjects
from engram_operator.controllers.snapshot_writes import SnapshotWrites
from engram_operator.controllers.stores import Stores, policy_name
from engram_operator.controllers.tombstones import Tombstones
from engram_operator.controllers.types import Clock, Enqueue
from engram_operator.engines import EngineError, EnginePod, EngineStatus, EventPage
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.kinds import MODELS, POLICIES, SNAPSHOTS, Kind
from engram_operator.resources import SnapshotPolicy

FAST_S = 5.0  # after something happened
SLOW_S = 30.0  # when nothing has for a while
QUIET_S = 60.0  # where nothing is published, and only losses matter
RELIST_S = 60.0  # between listings of one model
REQUESTS_PER_S = 20.0  # of all models together
PAGES = 40


class AsksEvents(AsksSnapshots, Protocol):
    async def events(self, pod: EnginePod, *, after: str | None = None) -> EventPage: ...


class WaitsForEngines(Protocol):
    """The part of SnapshotController that is told of engines."""

    def waiting_for(self, namespace: str, model: str) -> list[str]: ...
    def suspect(self, namespace: str, name: str) -> None: ...


@dataclass(slots=True)
class _View:
    """What is known of one model's store, and when to ask again."""

    ledger: Ledger
    cursor: str | None = None
    pod_uid: str = ""
    engine: EngineStatus | None = None
    due: datetime | None = None
    changed: datetime | None = None
    listed: datetime | None = None
    failures: int = 0
    basis: tuple[object, ...] = ()  # what the last look was made of
    left: bool = False  # the last look left something to do


class Publisher:
    """Key: the model. `syncs` tells the policies' controller when something was published last."""

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        clock: Clock,
        engines: AsksEvents,
        stores: Stores,
        handles: Handles,
        tombstones: Tombstones,
        writes: SnapshotWrites,
        snapshots: WaitsForEngines,
        enqueue: Enqueue,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._engines = engines
        self._stores = stores
        self._handles = handles
        self._snapshots = snapshots
        self._enqueue = enqueue
        self._objects = PublishedObjects(kube, cache, handles, tombstones, writes)
        self._views: dict[tuple[str, str], _View] = {}
        self._followed: dict[tuple[str, str], tuple[object, ...]] = {}
        self.syncs: dict[tuple[str, str], datetime] = {}

    @property
    def kind(self) -> Kind:
        return MODELS

    async def reconcile(self, namespace: str, name: str) -> float | None:
        key = (namespace, name)
        model = self._cache.get(MODELS, namespace, name)
        self._tell_policy(key, model)
        if model is None or "deletionTimestamp" in model["metadata"]:
            self._views.pop(key, None)
            return None
        pods = [pod for pod in self._stores.pods(namespace, name) if pod.ready]
        wanted = policy_name(model)
        policy = self._stores.policy(namespace, wanted) if wanted is not None else None
        if not pods or policy is None:
            self._views.pop(key, None)
            return None
        for waiting in self._snapshots.waiting_for(namespace, name):
            self._enqueue(SNAPSHOTS, namespace, waiting)
        if policy.publish_mode == "None" and not self._handles.of_model(namespace, name):
            self._views.pop(key, None)
            return QUIET_S
        view = self._views.setdefault(key, _View(Ledger(policy.publish_limit)))
        now = self._clock()
        changed = view.basis[1:] not in ((), (policy.publish_mode, policy.publish_limit))
        if not changed and view.due is not None and (left := (view.due - now).total_seconds()) > 0:
            return left
        return await self._look(model, policy, pods, view, now)

    def _tell_policy(self, key: tuple[str, str], model: Object | None) -> None:
        """A policy's status sums up its models: it is looked at when what it sums up differs, not at every event."""
        facts = None if model is None else _facts(model)
        before = self._followed.get(key)
        if facts == before:
            return
        for found in (before, facts):
            if found is not None and isinstance(found[0], str):
                self._enqueue(POLICIES, key[0], found[0])
        if facts is None:
            del self._followed[key]
        else:
            self._followed[key] = facts

    # Following the store

    async def _look(
        self, model: Object, policy: SnapshotPolicy, pods: list[EnginePod], view: _View, now: datetime
    ) -> float:
        pod = next((pod for pod in pods if pod.uid == view.pod_uid), pods[view.failures % len(pods)])
        try:
            heard = await self._follow(policy, pod, view, now)
        except EngineError:
            view.failures += 1
            view.pod_uid = ""
            return self._later(view, min(SLOW_S, FAST_S * 2.0 ** min(view.failures, 5)), now)
        view.failures, view.pod_uid = 0, pod.uid
        namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
        basis = (self._handles.changes(namespace, name), policy.publish_mode, policy.publish_limit)
        if heard or view.left or basis != view.basis:
            view.basis = basis
            view.changed = now
            shown = await self._objects.bring_about(model, policy, view.ledger, view.engine, now)
            view.left = shown.left
            for lost in shown.suspects:
                self._snapshots.suspect(namespace, lost)
                self._enqueue(SNAPSHOTS, namespace, lost)
            if shown.writes:
                self.syncs[namespace, policy.name] = now
                self._enqueue(POLICIES, namespace, policy.name)
        if view.left:
            return self._later(view, 1.0, now)
        if policy.publish_mode == "None":
            return self._later(view, QUIET_S, now)
        recent = view.changed is not None and (now - view.changed).total_seconds() < SLOW_S
        return self._later(view, FAST_S if recent else SLOW_S, now)

    def _later(self, view: _View, seconds: float, now: datetime) -> float:
        seconds = max(seconds, len(self._views) / REQUESTS_PER_S)
        view.due = now + timedelta(seconds=seconds)
        return seconds

    async def _follow(self, policy: SnapshotPolicy, pod: EnginePod, view: _View, now: datetime) -> bool:
        """Whether anything was new."""
        if view.cursor is None or pod.uid != view.pod_uid or view.ledger.limit != policy.publish_limit:
            await self._list(policy, pod, view, now)
            return True
        heard = False
        for _ in range(PAGES):
            page = await self._engines.events(pod, after=view.cursor)
            if page.lost:
                await self._list(policy, pod, view, now)
                return True
            view.ledger.apply(page.events, self._handles.is_erased)
            heard = heard or bool(page.events)
            view.cursor = page.next
            if not page.events:
                break
        if view.ledger.short and (view.listed is None or (now - view.listed).total_seconds() >= RELIST_S):
            await self._list(policy, pod, view, now)
            return True
        return heard

    async def _list(self, policy: SnapshotPolicy, pod: EnginePod, view: _View, now: datetime) -> None:
        """The newest of what there is. The cursor first: what happens during the listing is then seen twice, not
        never."""
        view.cursor = None
        cursor = (await self._engines.events(pod)).next
        view.engine = await self._engines.status(pod)
        view.ledger.begin(policy.publish_limit)
        after: str | None = None
        for _ in range(PAGES):
            page = await self._engines.snapshots(pod, limit=PAGE, after=after)
            for record in page.snapshots:
                if not self._handles.is_erased(record.snapshot_id):
                    view.ledger.add(record)
            after = page.next
            view.ledger.complete = after is None and not page.unreadable
            if after is None or view.ledger.full:
                break
        view.ledger.trim()
        view.cursor, view.listed = cursor, now


def _facts(model: Object) -> tuple[object, ...]:
    """What a policy's status shows of a model; the first is the policy's name."""
    status = model.get("status") or {}
    counts = status.get("snapshots") or {}
    ready: Object = next((entry for entry in status.get("conditions") or () if entry["type"] == "SnapshotsReady"), {})
    said = tuple(ready.get(name) for name in ("status", "reason", "message"))
    return (policy_name(model), *said, *(counts.get(name) for name in ("count", "totalBytes", "lastSuccessTime")))
