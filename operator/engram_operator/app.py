"""The operator as one thing: which events lead to which controller, and what runs when.

Order of a life: serve health, find the definitions, wait for the lease, list everything, and only then reconcile. It
ends on a signal by finishing what runs and giving the lease up; or at once, when the lease is lost. Nothing in memory
is needed by the next life.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engram_operator.builders import naming
from engram_operator.controllers import Controller
from engram_operator.kube import kinds, logs
from engram_operator.kube.audit import Audit, Watch
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import KubeError
from engram_operator.kube.kinds import Kind
from engram_operator.kube.lease import Election
from engram_operator.kube.metrics import Canary, HealthServer, Metrics
from engram_operator.kube.queue import KeyedQueue
from engram_operator.kube.watches import Connect, Watches
from engram_operator.settings import OperatorSettings

log = logging.getLogger(__name__)

MANAGED = f"app.kubernetes.io/managed-by={naming.MANAGER}"
WATCHES = (
    Watch(kinds.MODELS),
    Watch(kinds.POLICIES),
    Watch(kinds.SNAPSHOTS),
    Watch(kinds.STATEFULSETS, MANAGED),
    Watch(kinds.DEPLOYMENTS, MANAGED),
    Watch(kinds.PODS, MANAGED),
    Watch(kinds.SERVICES, MANAGED),
    Watch(kinds.SERVICE_ACCOUNTS, MANAGED),
    Watch(kinds.DISRUPTION_BUDGETS, MANAGED),
    Watch(kinds.NETWORK_POLICIES, MANAGED),
    Watch(kinds.JOBS, MANAGED),
    Watch(kinds.PVCS, MANAGED),
)
RETRY_S = 5.0
WORK_GRACE_S = 10.0

Key = tuple[str, str, str]  # controller, namespace, name
Place = tuple[Kind, str, str]


def concerned(kind: Kind, obj: Mapping[str, Any]) -> Iterator[Place]:
    """Objects that a controller should look at because this one changed: itself, its owners, whose pods they are.

    Models are told of a changed policy by the policy's own controller, which knows a change from a new status.
    """
    metadata = obj["metadata"]
    namespace, name = metadata.get("namespace") or "", metadata["name"]
    yield kind, namespace, name
    for owner in metadata.get("ownerReferences") or ():
        try:
            yield kinds.kind_of(owner), namespace, owner["name"]
        except ValueError:  # owned by something that is none of ours
            continue
    labels = metadata.get("labels") or {}
    if kind in (kinds.PODS, kinds.PVCS):  # owned by a StatefulSet or ReplicaSet, or by nobody
        if labels.get("app.kubernetes.io/name") == naming.APP and (model := labels.get("app.kubernetes.io/instance")):
            yield kinds.MODELS, namespace, model
        elif naming.activator_selector().items() <= labels.items():
            yield kinds.DEPLOYMENTS, namespace, naming.ACTIVATOR


@dataclass(slots=True)
class App:
    """`controllers` may be filled in after the fact: they need `enqueue` to be made."""

    kube: Kube
    settings: OperatorSettings
    connect: Connect
    metrics: Metrics = field(default_factory=Metrics)
    cache: Cache = field(default_factory=Cache)
    canary: Canary = field(default_factory=Canary)
    watches: Sequence[Watch] = WATCHES
    audit_s: float = 120.0
    retry_s: float = RETRY_S
    on_signals: Callable[[], None] = lambda: None  # called when kopf has taken the signal handlers
    on_lost: Callable[[], None] = lambda: None  # called when the lease is lost: to end the process there and then
    port: int = 0  # of the health server, once it listens
    queue: KeyedQueue[Key] = field(init=False)
    _controllers: dict[str, Controller] = field(default_factory=dict)
    _by_kind: dict[Kind, list[str]] = field(default_factory=dict)
    _synced: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting_for: str = "not started"
    _audit: Audit | None = None

    def __post_init__(self) -> None:
        self.queue = KeyedQueue(failed=self._failed, stop_grace_s=WORK_GRACE_S)
        self.kube.wrote = self._wrote
        self.metrics.watch_queue(self.queue)
        self.metrics.watch_cache(self.cache, [watch.kind for watch in self.watches])
        self.metrics.watch_canary(self.canary)

    def add(self, controllers: Iterable[Controller]) -> None:
        for controller in controllers:
            name = type(controller).__name__
            self._controllers[name] = controller
            self._by_kind.setdefault(controller.kind, []).append(name)

    # Events

    def enqueue(self, kind: Kind, namespace: str, name: str) -> None:
        """Have every controller of this kind look at the object soon."""
        for controller in self._by_kind.get(kind, ()):
            self.queue.add((controller, namespace, name))

    def event(self, kind: Kind, type_: str | None, obj: Mapping[str, Any]) -> None:
        """`type_` None: a list shows the object, as it does when a watch begins anew."""
        if type_ == "DELETED":
            metadata = obj["metadata"]
            self.cache.remove(kind, metadata.get("namespace") or "", metadata["name"], uid=metadata.get("uid"))
        else:
            self.cache.put(kind, obj)
        self._look(kind, obj)

    def _listed(self, kind: Kind) -> None:
        """A watch has begun anew: what was deleted before that, it does not tell."""
        if self._synced.is_set() and self._audit is not None:
            self._audit.soon(kind)

    def _look(self, kind: Kind, obj: Mapping[str, Any]) -> None:
        for place in concerned(kind, obj):
            self.enqueue(*place)

    def _gone(self, kind: Kind, obj: Object) -> None:
        self.metrics.missed.labels(kind.kind).inc()
        with logs.about(kind=kind.kind, namespace=obj["metadata"].get("namespace"), name=obj["metadata"]["name"]):
            log.info("deleted while nobody watched")
        self._look(kind, obj)

    # Work

    async def reconcile(self, key: Key) -> float | None:
        """One look of one controller, measured and logged. What it raises is the queue's to repeat."""
        controller, namespace, name = key
        owner = self._controllers[controller]
        known = self.cache.get(owner.kind, namespace, name)
        generation = known["metadata"].get("generation") if known is not None else None
        began = time.monotonic()
        outcome = "error"
        with logs.about(controller=controller, namespace=namespace, name=name, generation=generation):
            try:
                again = await owner.reconcile(namespace, name)
                outcome = "ok"
            finally:
                seconds = time.monotonic() - began
                self.metrics.reconciles.labels(controller, outcome).inc()
                self.metrics.seconds.labels(controller).observe(seconds)
                log.debug("reconciled", extra={"outcome": outcome, "seconds": round(seconds, 4)})
        if again is None and self.cache.get(owner.kind, namespace, name) is not None:
            # Spread out: what was listed together must not be looked at together for ever.
            return self.settings.resync_s * random.uniform(0.75, 1.25)
        return again

    def _wrote(self, kind: Kind, verb: str) -> None:
        self.metrics.wrote(kind, verb)
        log.info("wrote", extra={"kind": kind.kind, "verb": verb})

    def _failed(self, key: Key, error: Exception, delay_s: float) -> None:
        controller, namespace, name = key
        # Refusals of the API server say all in a line; anything else is a fault of ours.
        trace = None if isinstance(error, KubeError) else error
        with logs.about(controller=controller, namespace=namespace, name=name):
            message = f"reconcile failed: {error or type(error).__name__}"
            log.warning(message, extra={"again_s": round(delay_s, 1)}, exc_info=trace)

    # Life

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. LeaseLost, or what broke, is raised; nothing is written then, not even the lease."""
        health = HealthServer(self.metrics, lambda: self.canary.trouble, lambda: self._waiting_for)
        self.port = await health.start(self.settings.metrics_port)
        try:
            stopped = asyncio.create_task(stop.wait())
            election = self._candidate()
            for step in (self._find_definitions(), election.acquire()):
                task = asyncio.create_task(step)
                await asyncio.wait({stopped, task}, return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    task.cancel()
                    await asyncio.wait({task})
                    await election.release()
                    return
                task.result()
            await self._lead(stop, stopped, election)
            await health.stop()
            await election.release()
        finally:
            self.metrics.leader.set(0)
            await health.stop()

    async def _lead(self, stop: asyncio.Event, stopped: asyncio.Task[Any], election: Election) -> None:
        self.kube.may_write = lambda: election.leading
        self.metrics.leader.set(1)
        self.canary.start()
        self._waiting_for = "listing what there is"
        work_stop, watch_stop = asyncio.Event(), asyncio.Event()
        namespaces = self.settings.watch_namespaces
        self._audit = Audit(
            self.kube, self.cache, self.watches, namespaces or (None,), self._gone, self._dead, self.audit_s
        )
        lease = Watch(kinds.LEASES, fields=f"metadata.name={self.settings.lease_name}")
        watches = Watches(self.watches, lease, namespaces, self.connect, self.event, self._listed, self.canary.heard)
        holding = asyncio.create_task(election.hold(), name="lease")
        working = asyncio.create_task(self._work(self._audit, work_stop), name="work")
        auditing = asyncio.create_task(self._audit.run(), name="audit")
        watching = asyncio.create_task(watches.run(watch_stop, self.on_signals), name="watches")
        everything = {stopped, holding, working, auditing, watching}
        try:
            done, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            if holding in done:
                log.error(f"stopping at once: {holding.exception()}")
                self.on_lost()
            if not stop.is_set():
                if holding not in done:  # when kopf fails, it cancels what it did not start before it ends itself
                    await asyncio.wait({watching}, timeout=WORK_GRACE_S)
                for task in (holding, watching, working, auditing):
                    if task.done() and not task.cancelled():
                        task.result()
                raise RuntimeError("the operator's tasks were cancelled")
            self._waiting_for = "stopping"
            work_stop.set()
            if not self._synced.is_set():
                working.cancel()
            await asyncio.wait({working, holding}, return_when=asyncio.FIRST_COMPLETED)
            watch_stop.set()
            await asyncio.wait({watching}, timeout=WORK_GRACE_S)
        finally:
            for task in (holding, working, auditing, watching):
                task.cancel()
            await asyncio.wait({holding, working, auditing, watching}, timeout=WORK_GRACE_S)

    async def _work(self, audit: Audit, stop: asyncio.Event) -> None:
        """Nothing is decided from a cache that is not complete."""
        await audit.filled()
        log.info("listed everything", extra={kind.plural: n for kind, n in self.cache.counts().items()})
        self._synced.set()
        self._waiting_for = ""
        await self.queue.run(self.reconcile, self.settings.workers, stop)

    def _dead(self, kind: Kind) -> None:
        self.canary.condemn(f"the watch of {kind.plural} is dead")

    def _candidate(self) -> Election:
        settings = self.settings
        patient = Kube(self.kube.transport, deadline_s=0.0, wrote=self.metrics.wrote)
        return Election(
            patient,
            settings.lease_name,
            settings.lease_namespace,
            settings.identity,
            settings.lease_duration_s,
            settings.lease_renew_s,
            settings.lease_retry_s,
        )

    async def _find_definitions(self) -> None:
        """Return when every watched kind is served: kopf looks only once, and would be deaf to one that came later."""
        while True:
            try:
                missing = [watch.kind.plural for watch in self.watches if not await self.kube.serves(watch.kind)]
            except KubeError as error:
                self._waiting_for = f"the API server: {error.reason}"
                log.warning("the API server cannot be asked", extra={"error": str(error)})
            else:
                if not missing:
                    self._waiting_for = ""  # as a standby, it is as ready as can be
                    return
                self._waiting_for = f"the definitions of {', '.join(missing)}"
                log.warning("definitions are missing: install the CRDs", extra={"missing": ", ".join(missing)})
            self.kube.forget_apis()
            await asyncio.sleep(self.retry_s)
