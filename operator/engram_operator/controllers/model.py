"""The controller of EngramModel: one look at everything, the few writes that are missing, the status.

It never reads from an event what happened: it compares what is with what should be. So it can die anywhere, miss
anything, and be called twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from engram_operator.builders import naming
from engram_operator.controllers import drain, pods, sleep
from engram_operator.controllers.activator import Held, activator_is_ready
from engram_operator.controllers.apply import Applier, NameTaken, StillGoing
from engram_operator.controllers.intent import Intent, Unwanted, read_intent, refused_by_server
from engram_operator.controllers.rollout import Plan, immutable_problems, plan, read_record
from engram_operator.controllers.tenant_key import ensure_tenant_key, needs_namespace_key
from engram_operator.controllers.transitions import announcements
from engram_operator.controllers.types import Clock, Enqueue, build_settings
from engram_operator.controllers.warnings import Warnings, lacks_pods, silent
from engram_operator.engines import EngineError, EnginePod, EngineStatus, engine_pods
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import Conflict, Forbidden, Invalid, KindUnknown, NotFound, ServerFailed
from engram_operator.kube.kinds import (
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    MODELS,
    NETWORK_POLICIES,
    POD_MONITORS,
    PODS,
    PVCS,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFULSETS,
    Kind,
)
from engram_operator.resources import Schemas
from engram_operator.settings import OperatorSettings
from engram_operator.status import Observed, Refusal, same_status, status_of
from engram_operator.status.observed import Mode, Snapshots
from engram_operator.status.pods import is_ready

DISPENSABLE = (SERVICE_ACCOUNTS, DISRUPTION_BUDGETS, NETWORK_POLICIES)  # a changed spec may have no use for them
SOON_SECONDS = 1.0
WAITING_SECONDS = 5.0  # between looks at something that no event will tell of
REFUSED_SECONDS = 30.0
LIFTED = ("Forbidden", "NameTaken", "ServerFailed")  # not about the spec: may be lifted without an event
REPORT_SECONDS = 20.0  # between questions to engines that serve
NOTICE_SECONDS = 60.0  # an API that the cluster lacks may be installed; the client asks no more often
_MOST_REPORTS = 4096
_KEY: Object = {"kind": "Secret"}


class AsksEngines(Protocol):
    async def status(self, pod: EnginePod) -> EngineStatus: ...


@dataclass(frozen=True, slots=True)
class _Report:
    at: datetime
    status: EngineStatus | None  # None: no answer


@dataclass(frozen=True, slots=True)
class _Look:
    """What is there, from the cache."""

    model: Object
    stateful_set: Object | None
    service: Object | None
    pods: tuple[Object, ...]
    now: datetime


class ModelController:
    """`held` is shared with the ActivatorController; `enqueue` has another object looked at."""

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        settings: OperatorSettings,
        clock: Clock,
        engines: AsksEngines,
        held: Held,
        enqueue: Enqueue,
        schemas: Schemas,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._settings = settings
        self._build = build_settings(settings)
        self._clock = clock
        self._engines = engines
        self._held = held
        self._enqueue = enqueue
        self._schemas = schemas
        self._applier = Applier(kube, cache)
        self._warnings = Warnings(kube)
        self._reports: dict[str, _Report] = {}  # by pod uid
        self._unmonitored: set[str] = set()  # uids of models that are known to have no PodMonitor

    @property
    def kind(self) -> Kind:
        return MODELS

    async def reconcile(self, namespace: str, name: str) -> float | None:
        model = self._cache.get(MODELS, namespace, name)
        if model is None:
            if self._cache.get(DEPLOYMENTS, namespace, naming.ACTIVATOR) is not None:
                self._poke_activator(namespace)
            return None
        look = self._look(model)
        if model["metadata"].get("deletionTimestamp"):
            return await self._end(look)
        if not await drain.ensure_finalizer(self._kube, model):
            return SOON_SECONDS
        await pods.tend(self._kube, model, look.stateful_set, look.pods, look.now)
        waits = [pods.overdue_in(look.pods, look.now)]
        refusal: Refusal | None = None
        intent: Intent | None = None
        now_in = sleep.Stage.ASLEEP if sleep.is_asleep(look.stateful_set) else sleep.Stage.AWAKE
        rollout: Plan | None = None
        notice = ""
        reports = await self._ask(look, None)
        try:
            intent = read_intent(model, self._cache, self._schemas, self._build)
            reports = await self._ask(look, intent)
            idle = _idle(look, reports)
            now_in = sleep.stage(intent.model, self._sleep_facts(look, idle))
            waits.append(sleep.look_again(intent.model, now_in, idle))
            rollout, objects = self._plan(look, intent, now_in)
            notice = await self._bring_about(look, intent, rollout, objects)
        except Unwanted as unwanted:
            refusal = unwanted.refusal
            waits.append(REFUSED_SECONDS if refusal.reason in LIFTED else None)
        except (StillGoing, KindUnknown):
            return SOON_SECONDS
        if refusal is None and rollout is not None and rollout.rolls:
            return SOON_SECONDS  # the cache still shows the version before, and a status would call that the wanted one
        if intent is not None and (sleep.may_sleep(intent.model) or sleep.is_routed(look.service)):
            self._poke_activator(namespace)
        look = self._look(model)
        observed = await self._observe(look, intent, refusal, now_in, rollout, reports, notice)
        result = status_of(observed, look.now)
        waits.append(result.look_again)
        await self._publish(look.model, result.status)
        waits.append(NOTICE_SECONDS if notice else None)
        if any(is_ready(pod) for pod in look.pods):
            waits.append(REPORT_SECONDS)
        if len(look.pods) < observed.wanted or not all(is_ready(pod) for pod in look.pods):
            waits.append(WAITING_SECONDS)
        return min((wait for wait in waits if wait is not None), default=None)

    # Looking

    def _look(self, model: Object) -> _Look:
        namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
        labels = {"app.kubernetes.io/name": naming.APP, "app.kubernetes.io/instance": name}
        return _Look(
            model,
            self._cache.get(STATEFULSETS, namespace, name),
            self._cache.get(SERVICES, namespace, name),
            tuple(self._cache.labelled(PODS, namespace, labels)),
            self._clock(),
        )

    async def _ask(self, look: _Look, intent: Intent | None) -> dict[str, EngineStatus]:
        """What the ready engines say, by pod name; an answer is used for a while, unless a model may fall asleep."""
        found: dict[str, EngineStatus] = {}
        asked = []
        ready = [pod for pod in engine_pods(look.pods) if pod.ready]
        fresh = REPORT_SECONDS - 1
        if intent is not None and sleep.may_sleep(intent.model):
            fresh = sleep.ASK_SECONDS / 2
        for pod in ready:
            known = self._reports.get(pod.uid)
            age = (look.now - known.at).total_seconds() if known is not None else None
            if known is None or age is None or not 0 <= age < fresh:
                asked.append(self._report(pod, look.now))
        await asyncio.gather(*asked)
        for pod in ready:
            answer = self._reports[pod.uid].status
            if answer is not None:
                found[pod.name] = answer
        return found

    async def _report(self, pod: EnginePod, now: datetime) -> None:
        answer: EngineStatus | None
        try:
            answer = await self._engines.status(pod)
        except EngineError:
            answer = None
        self._reports.pop(pod.uid, None)
        while len(self._reports) >= _MOST_REPORTS:
            del self._reports[next(iter(self._reports))]
        self._reports[pod.uid] = _Report(now, answer)

    def _sleep_facts(self, look: _Look, idle: float | None) -> sleep.Seen:
        namespace, name = look.model["metadata"]["namespace"], look.model["metadata"]["name"]
        return sleep.Seen(
            stateful_set=look.stateful_set,
            service=look.service,
            ready=sum(is_ready(pod) for pod in look.pods),
            idle=idle,
            held=self._held.of(namespace, name),
            activator_ready=activator_is_ready(self._cache, namespace),
            now=look.now.timestamp(),
        )

    async def _observe(
        self,
        look: _Look,
        intent: Intent | None,
        refusal: Refusal | None,
        now_in: sleep.Stage,
        rollout: Plan | None,
        reports: dict[str, EngineStatus],
        notice: str,
    ) -> Observed:
        spec = look.model.get("spec") or {}
        mode: Mode = "Serving"
        wanted = int(spec.get("replicas", 1))
        if look.model["metadata"].get("deletionTimestamp"):
            mode, wanted = "Deleting", 0
        elif spec.get("suspend") or wanted == 0:
            mode, wanted = "Suspended", 0
        elif now_in is sleep.Stage.ASLEEP:
            mode, wanted = "Asleep", 0
        if refusal is not None and look.stateful_set is None:
            wanted = 0
        snapshots: Snapshots = "Store"
        if not (spec.get("snapshots") or {}).get("enabled", True):
            snapshots = "Disabled"
        elif intent is not None and intent.policy is None:
            snapshots = "LocalOnly"
        record = read_record(look.stateful_set) if look.stateful_set is not None else None
        since = rollout.since if rollout is not None else record.since if record is not None else None
        source = spec.get("model") or {}
        return Observed(
            model=look.model,
            mode=mode,
            wanted=wanted,
            served_name=str(source.get("name") or look.model["metadata"]["name"]),
            source=str(source.get("uri") or ""),
            snapshots=snapshots,
            deadline_seconds=int((spec.get("updateStrategy") or {}).get("progressDeadlineSeconds", 3600)),
            refused=refusal,
            stateful_set=look.stateful_set,
            pods=look.pods,
            warnings=await self._read_warnings(look, wanted),
            engines=reports,
            since=since,
            pending=rollout.pending if rollout is not None else None,
            notice=notice,
        )

    async def _read_warnings(self, look: _Look, wanted: int) -> dict[tuple[str, str], tuple[str, ...]]:
        about: list[Object] = silent(look.pods, look.now)
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for pod in about
            if not (pod.get("spec") or {}).get("nodeName")
            for volume in (pod.get("spec") or {}).get("volumes") or ()
            if "persistentVolumeClaim" in volume
        }
        for claim in sorted(claims):
            found = self._cache.get(PVCS, look.model["metadata"]["namespace"], claim)
            if found is not None and (found.get("status") or {}).get("phase") != "Bound":
                about.append(found)
        if look.stateful_set is not None and lacks_pods(look.stateful_set, look.pods, wanted, look.now):
            about.append(look.stateful_set)
        return await self._warnings.about(about, look.now)

    # Writing

    def _plan(self, look: _Look, intent: Intent, now_in: sleep.Stage) -> tuple[Plan, list[Object]]:
        objects = sleep.put_to(intent.objects, intent.model, now_in, look.service, look.now)
        rendered = next(obj for obj in objects if obj["kind"] == "StatefulSet")
        if look.stateful_set is not None and (problems := immutable_problems(rendered, look.stateful_set)):
            raise Unwanted(Refusal("ImmutableFieldChanged", "; ".join(problems)))
        rollout = plan(
            rendered,
            look.stateful_set,
            intent.inputs,
            self._settings.roll_policy,
            look.now,
            no_pods=not look.pods and rendered["spec"]["replicas"] == 0,
        )
        return rollout, [rollout.stateful_set if obj["kind"] == "StatefulSet" else obj for obj in objects]

    async def _bring_about(self, look: _Look, intent: Intent, rollout: Plan, objects: list[Object]) -> str:
        """Apply what differs. Nothing is written before the API server has taken the pods. Returns a notice."""
        metadata = look.model["metadata"]
        stateful_set = rollout.stateful_set
        notice = ""
        before = read_record(look.stateful_set) if look.stateful_set is not None else None
        if before is None or before.template != stateful_set["spec"]["template"]:
            await self._judge(self._applier.check(stateful_set), stateful_set, intent)
            if needs_namespace_key(intent.model, intent.policy):
                await self._judge(ensure_tenant_key(self._kube, intent.model.namespace), _KEY, intent)
        kept = []
        for obj in objects:
            if obj["kind"] == "PodMonitor":
                notice = await self._monitor(obj, intent)
                continue
            kept.append(obj)
            await self._judge(self._applier.ensure(obj), obj, intent)
        await self._applier.remove_others(DISPENSABLE, metadata["namespace"], metadata["uid"], kept)
        if not intent.model.monitoring.enabled:
            await self._unmonitor(look.model)
        if rollout.rolls:
            await self._kube.event(look.model, "RollingOut", "the pods are replaced by the changed version")
        if sleep.is_asleep(stateful_set) and not sleep.is_asleep(look.stateful_set):
            await self._kube.event(look.model, "Asleep", f"no request for {intent.model.idle_seconds} s: no pods now")
        if sleep.is_asleep(look.stateful_set) and not sleep.is_asleep(stateful_set):
            await self._kube.event(look.model, "Waking", "a request waits: the pods are started")
        return notice

    async def _judge(self, write: Awaitable[object], obj: Object, intent: Intent) -> None:
        """A write whose refusal is a fact about the resource, told in its status."""
        try:
            await write
        except (Invalid, Forbidden, ServerFailed) as error:
            raise Unwanted(refused_by_server(error, obj, intent.model)) from error
        except NameTaken as taken:
            raise Unwanted(Refusal("NameTaken", taken.message)) from taken

    async def _monitor(self, obj: Object, intent: Intent) -> str:
        """PodMonitors are not watched: their API may be missing, which is worth a word and nothing more."""
        if not await self._kube.serves(POD_MONITORS):
            return "spec.monitoring: this cluster has no PodMonitor API; metrics are served on the admin port anyway"
        self._unmonitored.discard(str(intent.model.uid))
        await self._judge(self._applier.ensure_unwatched(obj), obj, intent)
        return ""

    async def _unmonitor(self, model: Object) -> None:
        """Take the PodMonitor away once; a model that never had one costs a question per life of this process."""
        metadata = model["metadata"]
        if metadata["uid"] in self._unmonitored:
            return
        if await self._kube.serves(POD_MONITORS):
            try:
                live = await self._kube.get(POD_MONITORS, metadata["name"], metadata["namespace"])
            except Forbidden:  # the chart grants it only where monitoring is on: then there is none of ours
                live = None
            owners = (live or {}).get("metadata", {}).get("ownerReferences") or []
            if live is not None and any(owner["uid"] == metadata["uid"] for owner in owners):
                uid = live["metadata"]["uid"]
                await self._kube.delete(POD_MONITORS, metadata["name"], metadata["namespace"], uid=uid)
        self._unmonitored.add(metadata["uid"])

    async def _end(self, look: _Look) -> float | None:
        """Drain, then let it go. Owner references take the rest."""
        if sleep.is_routed(look.service):
            self._poke_activator(look.model["metadata"]["namespace"])
        if drain.FINALIZER not in (look.model["metadata"].get("finalizers") or ()):
            return None
        await pods.tend(self._kube, look.model, look.stateful_set, look.pods, look.now)
        await drain.stop_pods(self._kube, look.stateful_set)
        look = self._look(look.model)
        left = drain.seconds_left(look.model, look.pods, look.now)
        if left <= 0:
            if look.pods:
                text = f"{len(look.pods)} pods have not ended in time; the model is deleted all the same"
                await self._kube.event(look.model, "DrainTimedOut", text, type="Warning", action="Drain")
            return None if await drain.drop_finalizer(self._kube, look.model) else SOON_SECONDS
        observed = await self._observe(look, None, None, sleep.Stage.AWAKE, None, {}, "")
        await self._publish(look.model, status_of(observed, look.now).status)
        return min(left, WAITING_SECONDS)

    async def _publish(self, model: Object, status: Object) -> None:
        """Write the status where it differs, and tell what changed."""
        old = model.get("status") or {}
        if same_status(old, status):
            return
        metadata = model["metadata"]
        try:
            await self._kube.apply_status(MODELS, metadata["name"], metadata["namespace"], status, uid=metadata["uid"])
        except (NotFound, Conflict):  # it is gone, or another of its name is there: its event comes
            return
        for said in announcements(old, status):
            await self._kube.event(model, said.reason, said.message, type=said.type)

    def _poke_activator(self, namespace: str) -> None:
        self._enqueue(DEPLOYMENTS, namespace, naming.ACTIVATOR)


def _idle(look: _Look, reports: dict[str, EngineStatus]) -> float | None:
    """Seconds since the last request of any replica; None when one did not say, works, or is not there yet."""
    ready = [pod["metadata"]["name"] for pod in look.pods if is_ready(pod)]
    if not ready or len(ready) != len(look.pods):
        return None
    idle = []
    for name in ready:
        report = reports.get(name)
        if report is None or report.idle_seconds is None or report.running or report.waiting:
            return None
        idle.append(report.idle_seconds)
    return min(idle)
