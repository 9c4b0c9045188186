"""The end of a Snapshot: its bytes go before the object does, and the object stays while they cannot go.

An engine of the model deletes them at once. Where none runs, a Job does, one for many objects. Nobody's silence is
taken for a deletion: only what an engine that would know, or the Job, says is gone.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engram_operator.builders import BuildSettings
from engram_operator.builders.jobs import erase_args, snapshot_job
from engram_operator.controllers import snapshot_status
from engram_operator.controllers.asking import AsksSnapshots, capture_tag, find_tagged, would_know
from engram_operator.controllers.handles import Handles
from engram_operator.controllers.snapshot_writes import SnapshotWrites
from engram_operator.controllers.stores import Stores, policy_name
from engram_operator.controllers.tombstones import Tombstones
from engram_operator.controllers.types import Clock
from engram_operator.engines import EngineError, EngineNotFound, StoreTrouble
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import Forbidden, Invalid
from engram_operator.kube.kinds import JOBS, MODELS, PODS
from engram_operator.resources import SnapshotPolicy
from engram_operator.resources.snapshot import Snapshot, stored_ids
from engram_operator.status.pods import parse_time
from engram_operator.status.redact import redact

log = logging.getLogger(__name__)

ERASES_LABEL = "engram.dev/erases"
MEMBERS = "engram.dev/snapshots"  # annotation of a Job: names and uids of the objects it works for
CONDITION = "DataDeleted"
BATCH_WINDOW_S = 1.0  # a deletion of many arrives one by one
JOB_IDS = 500
JOB_WAIT_S = 60.0  # its events come sooner
ENGINE_ATTEMPTS = 3  # then a Job is asked, whatever the engines' trouble is
SOON_S = 0.5
TERMINATING = "is being terminated"
# What a Job's last words mean, in the terms of the conditions.
_REASONS = {
    "AccessDenied": re.compile(r"\bAccessDenied\b"),
    "BucketNotFound": re.compile(r"\b(BucketNotFound|BucketMissing|NoSuchBucket)\b"),
    "TLSError": re.compile(r"\bTLSError\b|certificate verify failed"),
    "Unreachable": re.compile(r"\bUnreachable\b|Could not connect to the endpoint|timed? ?out", re.IGNORECASE),
}


class _Engines(enum.Enum):
    """What asking the engines came to."""

    DONE = enum.auto()
    CANNOT_TELL = enum.auto()


@dataclass(frozen=True, slots=True)
class _Waiting:
    name: str
    uid: str
    ids: tuple[str, ...]


class Eraser:
    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        build: BuildSettings,
        clock: Clock,
        engines: AsksSnapshots,
        stores: Stores,
        handles: Handles,
        tombstones: Tombstones,
        writes: SnapshotWrites,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._build = build
        self._clock = clock
        self._engines = engines
        self._stores = stores
        self._handles = handles
        self._tombstones = tombstones
        self._writes = writes
        self._waiting: dict[tuple[str, str], dict[str, _Waiting]] = {}  # (namespace, group) -> uid -> who

    def waiting_for(self, job: Object) -> list[str]:
        """Names of Snapshots to look at when this Job changed: those it works for, and the next in line."""
        metadata = job["metadata"]
        names = list(_members(job))
        group = (metadata.get("labels") or {}).get(ERASES_LABEL, "")
        line = self._waiting.get((metadata["namespace"], group), {})
        return names + [entry.name for entry in list(line.values())[:1]]

    def waiting_behind(self, job: Object) -> list[str]:
        """Names of all that this Job works for or holds up: to be looked at when it has vanished."""
        metadata = job["metadata"]
        group = (metadata.get("labels") or {}).get(ERASES_LABEL, "")
        return [
            *_members(job),
            *(entry.name for entry in self._waiting.get((metadata["namespace"], group), {}).values()),
        ]

    def forget(self, namespace: str, uid: str) -> None:
        for (space, _), line in self._waiting.items():
            if space == namespace:
                line.pop(uid, None)

    async def finish(self, obj: Object, snapshot: Snapshot) -> float | None:
        """One step towards the end of an object that is being deleted. Seconds until the next; None: an event tells."""
        if not snapshot.held:
            return None
        if snapshot.abandoned:
            if not snapshot.published:
                await self._say_kept(obj, "DataAbandoned", "as the annotation asks")
            return await self._let_go(obj)
        status = obj.get("status") or {}
        if status.get("phase") == "Deleting" and (left := snapshot_status.wait_left(status, self._clock())):
            return left
        ids = stored_ids(obj)
        if not ids and snapshot.conversation is not None and status.get("phase") == "Capturing":
            # Its answer may have been lost: what was saved for it must go too.
            try:
                pods = self._stores.pods(snapshot.namespace, snapshot.model)
                found = await find_tagged(self._engines, pods, capture_tag(snapshot.uid))
            except EngineError as error:
                return await self._trouble(obj, snapshot, error.reason, error.message)
            ids = tuple(record.snapshot_id for record in found)
        if not ids or status.get("phase") == "Expired":
            return await self._let_go(obj)
        policy = self._stores.of_snapshot(obj)
        word = snapshot.deletion_policy or (policy.deletion_policy if policy is not None else "Delete")
        if word == "Retain":
            return await self._retain(obj, snapshot, ids)
        if shared := self._others(snapshot, ids):
            text = f"the bytes stay: they are also those of {', '.join(shared)}"
            await self._kube.event(obj, "DataKept", text, action="Delete")
            return await self._let_go(obj)
        return await self._erase(obj, snapshot, ids, policy)

    async def _erase(
        self, obj: Object, snapshot: Snapshot, ids: Sequence[str], policy: SnapshotPolicy | None
    ) -> float | None:
        status = obj.get("status") or {}
        attempts = _attempts(status)
        job = self._job_of(obj, snapshot, policy)
        if job is None:
            try:
                outcome = await self._ask_engines(obj, snapshot, ids, policy)
            except EngineError as error:
                stays = isinstance(error, StoreTrouble) or attempts < ENGINE_ATTEMPTS
                # The engines of a model that is going away end soon, and its namespace may be going too: to wait for
                # them would hold it up. What they could not do a Job can, or it is refused because of that.
                if stays and self._is_there(snapshot):
                    return await self._trouble(obj, snapshot, error.reason, error.message)
                outcome = _Engines.CANNOT_TELL
            if outcome is _Engines.DONE:
                self._handles.erase(ids)
                return await self._let_go(obj)
        store = policy if self._is_of(obj, policy) else self._stores.rebuilt(obj)
        if store is None:
            if "uri" not in status:  # it was in memory and on disks of replicas that are gone
                return await self._let_go(obj)
            text = f"nothing says how to reach {status['uri']}: make its SnapshotPolicy again, or abandon the data"
            return await self._trouble(obj, snapshot, "StoreUnknown", text)
        return await self._by_job(obj, snapshot, ids, store, job)

    async def _ask_engines(
        self, obj: Object, snapshot: Snapshot, ids: Sequence[str], policy: SnapshotPolicy | None
    ) -> _Engines:
        """EngineError of the last pod that could not say; StoreTrouble at once, since every pod has the same store."""
        pods = self._stores.pods(snapshot.namespace, snapshot.model)
        local = "uri" not in (obj.get("status") or {}) and policy is None
        if not pods or not (local or self._is_of(obj, policy)):
            return _Engines.CANNOT_TELL
        for snapshot_id in ids:
            gone, failure = False, None
            for pod in pods:
                try:
                    await self._engines.delete(pod, snapshot_id)
                    gone = True
                except EngineNotFound:
                    gone = gone or local or await would_know(self._kube, self._engines, pod, obj)
                except StoreTrouble:
                    raise
                except EngineError as error:
                    failure = error
                if gone and not local:  # what only replicas hold, each may hold
                    break
            if not gone and failure is not None:
                raise failure
            if not gone:
                return _Engines.CANNOT_TELL
        return _Engines.DONE

    def _is_there(self, snapshot: Snapshot) -> bool:
        """Whether its model is, and is not being deleted."""
        model = self._cache.get(MODELS, snapshot.namespace, snapshot.model)
        return model is not None and "deletionTimestamp" not in model["metadata"]

    def _is_of(self, obj: Object, policy: SnapshotPolicy | None) -> bool:
        """Whether the object's bytes are in this policy's store."""
        uri = (obj.get("status") or {}).get("uri")
        if policy is None:
            return False
        return uri is None or uri.startswith(policy.storage.uri.text.rstrip("/") + "/")

    # By a Job

    def _job_of(self, obj: Object, snapshot: Snapshot, policy: SnapshotPolicy | None) -> Object | None:
        store = policy if self._is_of(obj, policy) else self._stores.rebuilt(obj)
        if store is None:
            return None
        jobs = self._cache.labelled(JOBS, snapshot.namespace, {ERASES_LABEL: _group(snapshot.model, store)})
        mine = [job for job in jobs if _members(job).get(snapshot.name) == snapshot.uid]
        # A failure that was told already is over: the next attempt makes a Job of its own.
        told = parse_time(((obj.get("status") or {}).get("error") or {}).get("time"))
        mine = [job for job in mine if told is None or not _failed_before(job, told)]
        return max(mine, key=lambda job: str(job["metadata"].get("creationTimestamp")), default=None)

    async def _by_job(
        self, obj: Object, snapshot: Snapshot, ids: Sequence[str], store: SnapshotPolicy, job: Object | None
    ) -> float | None:
        if job is not None:
            return await self._look_at(obj, snapshot, ids, job)
        await self._show_deleting(obj, "a Job deletes the bytes: no engine of the model can")
        group = _group(snapshot.model, store)
        line = self._waiting.setdefault((snapshot.namespace, group), {})
        known = snapshot.uid in line
        line[snapshot.uid] = _Waiting(snapshot.name, snapshot.uid, tuple(ids))
        jobs = self._cache.labelled(JOBS, snapshot.namespace, {ERASES_LABEL: group})
        if any(_outcome(other)[0] is None for other in jobs):
            return JOB_WAIT_S
        if not known:
            return BATCH_WINDOW_S
        batch = _batch(line)
        try:
            await self._kube.create(self._job(snapshot, store, group, batch))
        except Forbidden as error:
            if TERMINATING in error.message:
                await self._say_kept(obj, "NamespaceTerminating", "its namespace takes no Job any more")
                return await self._let_go(obj)
            return await self._trouble(obj, snapshot, "JobRefused", error.message)
        except Invalid as error:
            return await self._trouble(obj, snapshot, "JobRefused", error.message)
        for entry in batch:
            line.pop(entry.uid, None)
        return JOB_WAIT_S

    def _job(self, snapshot: Snapshot, store: SnapshotPolicy, group: str, batch: Sequence[_Waiting]) -> Object:
        ids = [found for entry in batch for found in entry.ids]
        members = json.dumps({entry.name: entry.uid for entry in batch}, separators=(",", ":"))
        stamp = hashlib.sha256(f"{members}{self._clock().timestamp()}".encode()).hexdigest()[:10]
        spec = (self._cache.get(MODELS, snapshot.namespace, snapshot.model) or {}).get("spec")
        account = None if spec is None else spec.get("serviceAccountName") or f"{snapshot.model}-engine"
        return snapshot_job(
            f"engram-erase-{group}-{stamp}",
            store,
            self._build,
            erase_args(store, ids),
            image=((spec or {}).get("engine") or {}).get("image"),
            service_account=account,
            labels={ERASES_LABEL: group},
            annotations={MEMBERS: members},
        )

    async def _look_at(self, obj: Object, snapshot: Snapshot, ids: Sequence[str], job: Object) -> float | None:
        done, message = _outcome(job)
        if done is None:
            return JOB_WAIT_S
        if done:
            self._handles.erase(ids)
            return await self._let_go(obj)
        pods = self._cache.labelled(PODS, snapshot.namespace, {"job-name": job["metadata"]["name"]})
        reason, said = _last_words(pods)
        return await self._trouble(obj, snapshot, reason or "JobFailed", said or message)

    # Ends

    async def _retain(self, obj: Object, snapshot: Snapshot, ids: Sequence[str]) -> float | None:
        model = self._cache.get(MODELS, snapshot.namespace, snapshot.model)
        name = snapshot.policy or (policy_name(model) if model is not None else None)
        if name is not None and not await self._tombstones.add(snapshot.namespace, name, snapshot.model, ids):
            return SOON_S
        return await self._let_go(obj)

    async def _let_go(self, obj: Object) -> float | None:
        metadata = obj["metadata"]
        self.forget(metadata["namespace"], metadata["uid"])
        return None if await self._writes.finalizers(obj, hold=False) else SOON_S

    async def _say_kept(self, obj: Object, reason: str, why: str) -> None:
        """An event, and a log line: a namespace that ends takes no events."""
        status = obj.get("status") or {}
        what = status.get("uri") or ", ".join(stored_ids(obj)) or "nothing was stored"
        log.warning("bytes of a deleted Snapshot stay", extra={"reason": reason, "bytes": what})
        await self._kube.event(obj, reason, f"the bytes stay, {why}: {what}", type="Warning", action="Delete")

    async def _show_deleting(self, obj: Object, message: str) -> None:
        before = obj.get("status") or {}
        if before.get("phase") != "Deleting":
            generation = obj["metadata"].get("generation", 1)
            await self._writes.status(obj, snapshot_status.deleting(before, message, generation, self._clock()))

    async def _trouble(self, obj: Object, snapshot: Snapshot, reason: str, message: str) -> float:
        before = dict(obj.get("status") or {})
        if not _attempts(before):  # an error from before the deletion counts for nothing here
            before.pop("error", None)
        text = redact(message, 512)
        status = snapshot_status.failed(
            before, reason, text, snapshot.generation, self._clock(), phase="Deleting", kind=CONDITION
        )
        await self._writes.status(obj, status)
        await self._kube.event(obj, reason, f"the bytes are not deleted: {text}", type="Warning", action="Delete")
        return snapshot_status.wait_left(status, self._clock())

    def _others(self, snapshot: Snapshot, ids: Sequence[str]) -> list[str]:
        """Other objects, made by users and not going away, that stand for the same bytes."""
        names = {name for found in ids for name in self._handles.holders(snapshot.namespace, found)} - {snapshot.name}
        found = []
        for name in sorted(names):
            handle = self._handles.get(snapshot.namespace, name)
            if handle is not None and not handle.published and not handle.deleting:
                found.append(name)
        return found


def _attempts(status: Mapping[str, Any]) -> int:
    """Of the deletion."""
    return int((status.get("error") or {}).get("attempts", 0)) if status.get("phase") == "Deleting" else 0


def _group(model: str, store: SnapshotPolicy) -> str:
    """Deletions that one Job can do: the same store, the same account."""
    return hashlib.sha256(f"{model}\0{store.storage.uri.text}".encode()).hexdigest()[:10]


def _batch(line: Mapping[str, _Waiting]) -> list[_Waiting]:
    batch: list[_Waiting] = []
    count = 0
    for entry in line.values():
        if batch and count + len(entry.ids) > JOB_IDS:
            break
        batch.append(entry)
        count += len(entry.ids)
    return batch


def _members(job: Object) -> dict[str, str]:
    text = (job["metadata"].get("annotations") or {}).get(MEMBERS)
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _outcome(job: Object) -> tuple[bool | None, str]:
    """(True done, False failed, None still at work; what the Job says)."""
    for entry in (job.get("status") or {}).get("conditions") or ():
        if entry.get("status") == "True" and entry.get("type") == "Complete":
            return True, ""
        if entry.get("status") == "True" and entry.get("type") == "Failed":
            return False, str(entry.get("message") or entry.get("reason") or "the Job failed")
    return None, ""


def is_at_work(job: Object) -> bool:
    """A Job that deletes bytes and has not ended."""
    return ERASES_LABEL in (job["metadata"].get("labels") or {}) and _outcome(job)[0] is None


def _failed_before(job: Object, moment: datetime) -> bool:
    if _outcome(job)[0] is not False:
        return False
    ended = [parse_time(entry.get("lastTransitionTime")) for entry in job["status"]["conditions"]]
    return all(end is None or end <= moment for end in ended)


def _last_words(pods: Sequence[Object]) -> tuple[str | None, str]:
    """A reason, where the command names one of ours, and the last lines of the newest pod that failed."""
    newest = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True)
    for pod in newest:
        for entry in (pod.get("status") or {}).get("containerStatuses") or ():
            ended: Mapping[str, Any] = (entry.get("state") or {}).get("terminated") or {}
            if ended.get("exitCode"):
                text = str(ended.get("message") or "").strip()
                known = next((reason for reason, words in _REASONS.items() if words.search(text)), None)
                return known, text
    return None, ""
