"""The controller of SnapshotPolicy: what its models' engines say of the store, summed up; and the sweeps of the store.

Engines check, save and sweep by themselves while they run. What is left to do here: say it in one place, and have the
store swept where no engine runs, because retention does not end when a model sleeps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from engram_operator.builders import BuildSettings
from engram_operator.builders.jobs import snapshot_job, sweep_args
from engram_operator.controllers import snapshot_status
from engram_operator.controllers.background import Background
from engram_operator.controllers.stores import Stores, policy_name
from engram_operator.controllers.tombstones import Tombstones
from engram_operator.controllers.types import Clock, Enqueue
from engram_operator.engines import EngineError, EnginePod, SweepReport
from engram_operator.errors import ResourceError
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import Conflict, Forbidden, Invalid, NotFound
from engram_operator.kube.kinds import JOBS, MODELS, PODS, POLICIES, Kind
from engram_operator.resources import SnapshotPolicy
from engram_operator.status.pods import parse_time
from engram_operator.status.redact import redact

SWEEPS_LABEL = "engram.dev/sweeps"
SETTLE_S = 5.0  # between two writes of one status: a busy store changes its counts all the time
JOB_WAIT_S = 60.0
RETRY_S = 300.0
UNUSED_INTERVAL_S = 86400  # of a policy without models: nothing new comes, things only grow old


class Sweeps(Protocol):
    async def sweep(self, pod: EnginePod) -> SweepReport: ...


class PolicyController:
    """`syncs`: when the publisher last changed an object of a policy."""

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        build: BuildSettings,
        clock: Clock,
        engines: Sweeps,
        stores: Stores,
        tombstones: Tombstones,
        syncs: Mapping[tuple[str, str], datetime],
        enqueue: Enqueue,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._build = build
        self._clock = clock
        self._engines = engines
        self._stores = stores
        self._tombstones = tombstones
        self._syncs = syncs
        self._enqueue = enqueue
        self._known: dict[tuple[str, str], tuple[str, int]] = {}  # uid and generation that the models were told of
        self._written: dict[tuple[str, str], datetime] = {}
        self._sweeps: Background[tuple[str, str], SweepReport] = Background(lambda key: enqueue(POLICIES, *key))
        self._retry: dict[tuple[str, str], datetime] = {}

    @property
    def kind(self) -> Kind:
        return POLICIES

    async def reconcile(self, namespace: str, name: str) -> float | None:
        key = (namespace, name)
        obj = self._cache.get(POLICIES, namespace, name)
        models = [m for m in self._cache.list(MODELS, namespace) if policy_name(m) == name]
        self._tell_models(key, obj, models)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            # What it stored stays: each Snapshot has its own word about its bytes, and remembers where they are.
            self._tombstones.forget(namespace, name)
            return None
        now = self._clock()
        old = obj.get("status") or {}
        try:
            policy = self._stores.read_policy(namespace, name)
        except ResourceError as error:
            status = self._status(obj, models, now, ("False", "InvalidPolicy", redact(str(error), 1024)))
            await self._write(obj, status)
            return None
        assert policy is not None
        done, wait = await self._collect(obj, policy, models, now)
        status = self._status(obj, models, now, _store_condition(models)) | done
        if status != old:
            last = self._written.get(key)
            urgent = old.get("conditions") is None or _words(old) != _words(status) or done
            if last is not None and not urgent and (left := SETTLE_S - (now - last).total_seconds()) > 0:
                return left
            await self._write(obj, status)
            self._written[key] = now
        return wait

    def _tell_models(self, key: tuple[str, str], obj: Object | None, models: Iterable[Object]) -> None:
        """A policy that came, changed or went is a change of each of its models; a status is none."""
        metadata = obj["metadata"] if obj is not None else {}
        now = (str(metadata.get("uid", "")), int(metadata.get("generation", 0)))
        if self._known.get(key, ("", 0)) == now:
            return
        self._known[key] = now
        for model in models:
            self._enqueue(MODELS, key[0], model["metadata"]["name"])
        if obj is None:
            self._known.pop(key)
            self._written.pop(key, None)
            self._retry.pop(key, None)

    # Status

    def _status(self, obj: Object, models: list[Object], now: datetime, ready: tuple[str, str, str]) -> dict[str, Any]:
        """Whole, and the same when nothing changed."""
        metadata, old = obj["metadata"], obj.get("status") or {}
        namespace, name = metadata["namespace"], metadata["name"]
        counts = [(model.get("status") or {}).get("snapshots") or {} for model in models]
        times = [text for text in (entry.get("lastSuccessTime") for entry in counts) if text]
        times += [old["lastSuccessTime"]] if "lastSuccessTime" in old else []
        synced = self._syncs.get((namespace, name))
        status: dict[str, Any] = {
            "observedGeneration": metadata.get("generation", 1),
            "models": len(models),
            "snapshots": sum(entry.get("count", 0) for entry in counts),
            "totalBytes": sum(entry.get("totalBytes", 0) for entry in counts),
            "conditions": [_condition(old, *ready, metadata.get("generation", 1), now)],
        }
        optional = {
            "lastSuccessTime": max(times, default=None),
            "lastGcTime": old.get("lastGcTime"),
            "lastGcDeleted": old.get("lastGcDeleted"),
            "lastSyncTime": snapshot_status.stamp(synced) if synced is not None else old.get("lastSyncTime"),
            "unpublished": self._tombstones.listed(namespace, name) or None,
        }
        return status | {field: value for field, value in optional.items() if value is not None}

    async def _write(self, obj: Object, status: Mapping[str, Any]) -> None:
        metadata, old = obj["metadata"], obj.get("status") or {}
        if status == old:
            return
        try:
            await self._kube.apply_status(
                POLICIES, metadata["name"], metadata["namespace"], dict(status), uid=metadata["uid"]
            )
        except (NotFound, Conflict):
            return
        before, after = _words(old), _words(status)
        if before != after and after[0] == "False":
            await self._kube.event(obj, after[1], str(status["conditions"][0]["message"]), type="Warning")
        elif after[0] == "True" and before[0] == "False":
            await self._kube.event(obj, after[1], "the store can be used again")

    # Sweeps

    async def _collect(
        self, obj: Object, policy: SnapshotPolicy, models: list[Object], now: datetime
    ) -> tuple[dict[str, Any], float | None]:
        """(fields of the status that changed by it, seconds until the next look)."""
        if policy.suspend:
            return {}, None
        key = (policy.namespace, policy.name)
        status, metadata = obj.get("status") or {}, obj["metadata"]
        interval = policy.retention.gc_interval_seconds if models else UNUSED_INTERVAL_S
        last = parse_time(status.get("lastGcTime")) or parse_time(metadata.get("creationTimestamp")) or now
        if self._sweeps.runs(key):
            return {}, JOB_WAIT_S
        try:
            report = self._sweeps.take(key)
        except EngineError as error:
            said = redact(error.message, 512)
            await self._kube.event(obj, error.reason, f"the store was not swept: {said}", type="Warning")
            self._retry[key] = now + timedelta(seconds=RETRY_S)
            return {}, RETRY_S
        if report is not None:
            return _swept(report.snapshots_deleted, now), float(interval)
        jobs = self._cache.labelled(JOBS, policy.namespace, {SWEEPS_LABEL: _label(policy.name)})
        for job in jobs:
            ended = _ended(job)
            if ended is None:
                return {}, JOB_WAIT_S
            if ended[0] and ended[1] > last:
                pods = self._cache.labelled(PODS, policy.namespace, {"job-name": job["metadata"]["name"]})
                return _swept(_deleted_by(pods), ended[1]), float(interval)
            if not ended[0] and ended[1] > last:
                last = max(last, ended[1] + timedelta(seconds=RETRY_S - interval))
        due = max(last + timedelta(seconds=interval), self._retry.get(key, last))
        if (left := (due - now).total_seconds()) > 0:
            return {}, left
        names = [model["metadata"]["name"] for model in models]
        asked = [pod for model in names for pod in self._stores.pods(policy.namespace, model) if pod.ready]
        if asked:
            self._sweeps.start(key, self._sweep(asked[:3]))
            return {}, JOB_WAIT_S
        try:
            await self._kube.create(self._job(policy, models, now))
        except (Forbidden, Invalid) as error:
            said = redact(error.message, 512)
            await self._kube.event(obj, "JobRefused", f"the store was not swept: {said}", type="Warning")
            self._retry[key] = now + timedelta(seconds=RETRY_S)
            return {}, RETRY_S
        return {}, JOB_WAIT_S

    async def _sweep(self, pods: Sequence[EnginePod]) -> SweepReport:
        """One sweep is of the whole store, whoever makes it."""
        failure: EngineError | None = None
        for pod in pods:
            try:
                return await self._engines.sweep(pod)
            except EngineError as error:
                failure = error
        assert failure is not None
        raise failure

    def _job(self, policy: SnapshotPolicy, models: list[Object], now: datetime) -> Object:
        stamp = hashlib.sha256(f"{policy.name}{now.timestamp()}".encode()).hexdigest()[:10]
        model = models[0] if models else None
        spec = (model or {}).get("spec") or {}
        account = None
        if model is not None:
            account = spec.get("serviceAccountName") or f"{model['metadata']['name']}-engine"
        return snapshot_job(
            f"engram-sweep-{_label(policy.name)}-{stamp}",
            policy,
            self._build,
            sweep_args(policy),
            image=(spec.get("engine") or {}).get("image"),
            service_account=account,
            labels={SWEEPS_LABEL: _label(policy.name)},
            annotations={"engram.dev/policy": policy.name},
        )


def _store_condition(models: Iterable[Object]) -> tuple[str, str, str]:
    """(status, reason, message) of Ready: the first store trouble that a model's engines report, in their words."""
    heard: tuple[str, str, str] | None = None
    for model in sorted(models, key=lambda model: str(model["metadata"]["name"])):
        entries = (model.get("status") or {}).get("conditions") or ()
        said = next((entry for entry in entries if entry["type"] == "SnapshotsReady"), None)
        if said is None or said["reason"] in ("Disabled", "LocalOnly"):
            continue
        if said["status"] == "False":
            return "False", said["reason"], f'EngramModel "{model["metadata"]["name"]}": {said["message"]}'
        if said["status"] == "True" and heard is None:
            heard = ("True", said["reason"], said.get("message", ""))
    return heard or ("Unknown", "NoReport", "no engine that uses this policy has reported on its store yet")


def _condition(
    old: Mapping[str, Any], word: str, reason: str, message: str, generation: int, now: datetime
) -> dict[str, Any]:
    before: Mapping[str, Any] = next((e for e in old.get("conditions") or () if e["type"] == "Ready"), {})
    return {
        "type": "Ready",
        "status": word,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": before["lastTransitionTime"]
        if before.get("status") == word
        else snapshot_status.stamp(now),
    }


def _words(status: Mapping[str, Any]) -> tuple[Any, Any]:
    entry: Mapping[str, Any] = next(iter(status.get("conditions") or ()), {})
    return entry.get("status"), entry.get("reason")


def _label(policy: str) -> str:
    """A policy's name may be longer than a label."""
    return hashlib.sha256(policy.encode()).hexdigest()[:10]


def _swept(deleted: int | None, when: datetime) -> dict[str, Any]:
    found: dict[str, Any] = {"lastGcTime": snapshot_status.stamp(when)}
    return found if deleted is None else found | {"lastGcDeleted": deleted}


def _ended(job: Object) -> tuple[bool, datetime] | None:
    """(whether it did what it should, when it ended); None while it works."""
    for entry in (job.get("status") or {}).get("conditions") or ():
        if entry.get("status") == "True" and entry.get("type") in ("Complete", "Failed"):
            when = parse_time(entry.get("lastTransitionTime"))
            return entry["type"] == "Complete", when or datetime.fromisoformat(
                str(job["metadata"]["creationTimestamp"])
            )
    return None


def _deleted_by(pods: Iterable[Object]) -> int | None:
    """The command's last line is its report; None when it cannot be read."""
    for pod in pods:
        for entry in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (entry.get("state") or {}).get("terminated") or {}
            text = str(ended.get("message") or "").strip()
            if ended.get("exitCode") != 0 or not text:
                continue
            try:
                report = json.loads(text.splitlines()[-1])
            except (ValueError, RecursionError):
                continue
            found = report.get("snapshots_deleted") if isinstance(report, dict) else None
            if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**63:
                return found
    return None
