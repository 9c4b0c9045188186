"""The controller of Snapshot: takes one when asked, passes on what a user changes, ends it with its bytes.

Most objects are a view of what the store holds, and there may be thousands: for one that is as it should be, a look
costs a few dictionary reads and nothing else. What the store does by itself the publisher tells of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engram_operator.controllers import snapshot_status
from engram_operator.controllers.asking import AsksSnapshots, capture_tag, find_tagged, is_gone
from engram_operator.controllers.background import Background
from engram_operator.controllers.erase import Eraser
from engram_operator.controllers.handles import Handles
from engram_operator.controllers.snapshot_status import Origin
from engram_operator.controllers.snapshot_writes import SnapshotWrites
from engram_operator.controllers.stores import Stores
from engram_operator.controllers.types import Clock, Enqueue
from engram_operator.engines import (
    EngineError,
    EngineInvalid,
    EngineNotFound,
    EnginePod,
    EngineUnreachable,
    SaveRequest,
    StoredSnapshot,
    ranked,
)
from engram_operator.errors import ResourceError
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.kinds import MODELS, SNAPSHOTS, Kind
from engram_operator.resources import Schemas
from engram_operator.resources.snapshot import DELETION_POLICY, FINALIZER, Snapshot, stored_ids
from engram_operator.status.pods import parse_time
from engram_operator.status.redact import redact

SOON_S = 0.5
SAVE_LOOK_S = 60.0  # its end comes sooner
UNKNOWN_ATTEMPTS = 3  # a conversation that no replica knows may just be on its way to the store


@dataclass(frozen=True, slots=True)
class _Saved:
    uid: str
    records: tuple[StoredSnapshot, ...]
    pod: EnginePod


class SnapshotController:
    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        clock: Clock,
        engines: AsksSnapshots,
        schemas: Schemas,
        stores: Stores,
        handles: Handles,
        writes: SnapshotWrites,
        eraser: Eraser,
        enqueue: Enqueue,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._clock = clock
        self._engines = engines
        self._schemas = schemas
        self._stores = stores
        self._handles = handles
        self._writes = writes
        self._eraser = eraser
        self._waiting: dict[tuple[str, str], set[str]] = {}  # by model: names that wait for an engine
        self._saves: Background[tuple[str, str], _Saved] = Background(lambda key: enqueue(SNAPSHOTS, *key))
        self._suspects: set[tuple[str, str]] = set()

    @property
    def kind(self) -> Kind:
        return SNAPSHOTS

    def waiting_for(self, namespace: str, model: str) -> list[str]:
        """Names of objects to look at when an engine of this model became ready."""
        return sorted(self._waiting.get((namespace, model), ()))

    def suspect(self, namespace: str, name: str) -> None:
        """Its bytes may be gone: ask before anything is said."""
        self._suspects.add((namespace, name))

    async def reconcile(self, namespace: str, name: str) -> float | None:
        before = self._handles.get(namespace, name)
        self._handles.note(namespace, name)
        obj = self._writes.get(namespace, name)
        if obj is None:
            if before is not None:
                self._stop_waiting(namespace, before.model, name)
                self._eraser.forget(namespace, before.uid)
            return None
        suspected = (namespace, name) in self._suspects
        self._suspects.discard((namespace, name))
        if not suspected and self._is_settled(obj):
            return self._expires_in(obj)
        try:
            snapshot = Snapshot.parse(self._schemas.defaulted(obj))
        except (ResourceError, KeyError, TypeError, AttributeError) as error:
            return await self._refuse(obj, error)
        if snapshot.deleting:
            self._stop_waiting(namespace, snapshot.model, name)
            if self._saves.runs((namespace, name)):
                return SAVE_LOOK_S  # what it stores must go too
            with suppress(EngineError):
                self._saves.take((namespace, name))
            return await self._eraser.finish(obj, snapshot)
        if not snapshot.held:
            return await self._hold(obj, snapshot)
        if suspected and (obj.get("status") or {}).get("phase") == "Ready" and await self._is_lost(obj, snapshot):
            return await self._lost(obj, snapshot)
        if self._is_settled(obj):
            return self._expires_in(obj)
        return await self._advance(obj, snapshot)

    async def _is_lost(self, obj: Object, snapshot: Snapshot) -> bool:
        """Proven, not guessed: every id of it."""
        pods = [pod for pod in self._stores.pods(snapshot.namespace, snapshot.model) if pod.ready]
        for snapshot_id in stored_ids(obj):
            if not await is_gone(self._kube, self._engines, pods, obj, snapshot_id):
                return False
        return True

    def _is_settled(self, obj: Object) -> bool:
        """Nothing to do: held, not going away, and its status is the last word about this spec."""
        metadata, status = obj["metadata"], obj.get("status") or {}
        return (
            "deletionTimestamp" not in metadata
            and FINALIZER in (metadata.get("finalizers") or ())
            and status.get("phase") in snapshot_status.FINAL_PHASES
            and status.get("observedGeneration") == metadata.get("generation")
            and (self._expires_in(obj) or 1.0) > 0
        )

    def _expires_in(self, obj: Object) -> float | None:
        """Seconds; None for never, or for what has ended already."""
        status = obj.get("status") or {}
        expires = parse_time(status.get("expirationTime"))
        if expires is None or status.get("phase") != "Ready":
            return None
        left = (expires - self._clock()).total_seconds()
        return left if left > 0 else -1.0

    async def _hold(self, obj: Object, snapshot: Snapshot) -> float | None:
        """The finalizer, before anything is stored for the object; with it the policy's word, as it is now."""
        if snapshot.abandoned and snapshot.published:
            # Taken out of view, and the operator ended in between.
            await self._kube.delete(SNAPSHOTS, snapshot.name, snapshot.namespace, uid=snapshot.uid)
            return None
        policy = self._stores.of_snapshot(obj)
        word = policy.deletion_policy if snapshot.deletion_policy is None and policy is not None else None
        await self._writes.finalizers(obj, hold=True, annotations={DELETION_POLICY: word} if word else None)
        return SOON_S

    async def _advance(self, obj: Object, snapshot: Snapshot) -> float | None:
        status = obj.get("status") or {}
        phase = status.get("phase")
        if phase in ("Failed", "Expired"):  # final: only the generation is new
            await self._writes.status(obj, {**status, "observedGeneration": snapshot.generation})
            return None
        if phase == "Ready" and (self._expires_in(obj) or 1.0) <= 0:
            return await self._confirm(obj, snapshot)
        if left := snapshot_status.wait_left(status, self._clock()):
            return left
        pods = [pod for pod in self._stores.pods(snapshot.namespace, snapshot.model) if pod.ready]
        if not pods and not self._saves.ended((snapshot.namespace, snapshot.name)):
            return await self._wait(obj, snapshot)
        self._stop_waiting(snapshot.namespace, snapshot.model, snapshot.name)
        if snapshot.conversation is not None and phase != "Ready":
            return await self._capture(obj, snapshot, pods)
        return await self._pass_on(obj, snapshot, pods)

    # Taking one

    async def _capture(self, obj: Object, snapshot: Snapshot, pods: Sequence[EnginePod]) -> float | None:
        """Start it, or take what it came to. An upload takes as long as it takes: it runs beside the queue."""
        key, status = (snapshot.namespace, snapshot.name), obj.get("status") or {}
        if self._saves.runs(key):
            return SAVE_LOOK_S
        try:
            saved = self._saves.take(key)
        except EngineError as error:
            return await self._not_taken(obj, snapshot, status, error)
        if saved is not None and saved.uid == snapshot.uid:
            return await self._store(obj, snapshot, saved.records, saved.pod, taken=True)
        again = status.get("phase") == "Capturing"
        if not again:
            now = self._clock()
            waiting = snapshot_status.pending(status, "Capturing", "Capturing", "", snapshot.generation, now)
            if not await self._writes.status(obj, waiting):
                return None
        self._saves.start(key, self._save(snapshot, pods, again))
        return SAVE_LOOK_S

    async def _save(self, snapshot: Snapshot, pods: Sequence[EnginePod], again: bool) -> _Saved:
        """`again`: the answer to an earlier attempt never came, so it may have been done."""
        told = snapshot.conversation
        assert told is not None
        tag = capture_tag(snapshot.uid)
        pods = ranked(told.id, pods)
        if again and (found := await find_tagged(self._engines, pods, tag)):
            return _Saved(snapshot.uid, tuple(found), pods[0])
        request = SaveRequest(
            told.id,
            branch_name=told.branch,
            turn_number=told.turn,
            tenant=told.tenant,
            pin=snapshot.pinned,
            tag=tag,
            ttl_seconds=snapshot.ttl_seconds,
        )
        failure: EngineError = EngineUnreachable("no replica was asked")
        for pod in pods:
            try:
                return _Saved(snapshot.uid, await self._engines.save(pod, request), pod)
            except EngineNotFound as error:
                failure = error
        raise failure

    async def _not_taken(
        self, obj: Object, snapshot: Snapshot, status: Mapping[str, Any], failure: EngineError
    ) -> float | None:
        """Once more later, unless asking again cannot help."""
        attempts = int((status.get("error") or {}).get("attempts", 0)) + 1
        reason, message, final = failure.reason, redact(failure.message, 512), isinstance(failure, EngineInvalid)
        if isinstance(failure, EngineNotFound):
            reason, message = "ConversationNotFound", "no replica of the model knows this conversation, branch and turn"
            final = attempts >= UNKNOWN_ATTEMPTS
        phase = "Failed" if final else "Capturing" if isinstance(failure, EngineUnreachable) else "Pending"
        now = self._clock()
        new = snapshot_status.failed(status, reason, message, snapshot.generation, now, phase=phase)
        await self._writes.status(obj, new)
        if final or attempts == 1:
            await self._kube.event(obj, reason, message, type="Warning", action="Capture")
        return None if final else snapshot_status.wait_left(new, now)

    async def _wait(self, obj: Object, snapshot: Snapshot) -> float | None:
        """No engine: it waits for one without being looked at again and again."""
        key = (snapshot.namespace, snapshot.model)
        self._waiting.setdefault(key, set()).add(snapshot.name)
        status = obj.get("status") or {}
        if status.get("phase") in ("Ready", "Capturing"):
            return None
        reason, message = "NoEngine", f'no replica of "{snapshot.model}" is ready: it is taken as soon as one is'
        if self._cache.get(MODELS, *key) is None:
            reason, message = "ModelNotFound", f'there is no EngramModel "{snapshot.model}" in this namespace'
        new = snapshot_status.pending(status, "Pending", reason, message, snapshot.generation, self._clock())
        await self._writes.status(obj, new)
        return None

    # What is stored

    async def _pass_on(self, obj: Object, snapshot: Snapshot, pods: Sequence[EnginePod]) -> float | None:
        """A changed spec to the store; a new object of a stored snapshot first adopts what the store has."""
        status = obj.get("status") or {}
        snapshot_id = str(status.get("snapshotID") or snapshot.snapshot_id)
        first = status.get("phase") != "Ready"
        wishes: dict[str, Any] = {"pinned": snapshot.pinned, "ttl_seconds": snapshot.ttl_seconds}
        if first:  # what is not said is left as the store has it
            wishes = {name: value for name, value in wishes.items() if value}
        failure: EngineError | None = None
        for pod in pods:
            try:
                if wishes:
                    record = await self._engines.change(pod, snapshot_id, **wishes)
                else:
                    record = await self._engines.snapshot(pod, snapshot_id)
            except EngineNotFound:
                if await is_gone(self._kube, self._engines, [pod], obj, snapshot_id):
                    return await self._lost(obj, snapshot)
                failure = EngineError("no engine of the model has this snapshot's store", reason="OtherStore")
            except EngineError as error:
                failure = error
            else:
                return await self._store(obj, snapshot, [record], pod, taken=False)
        assert failure is not None
        now = self._clock()
        phase = "Pending" if first else "Ready"
        new = snapshot_status.failed(
            status, failure.reason, redact(failure.message, 512), snapshot.generation, now, phase=phase
        )
        if not first:
            # It can still be restored; only the change has not arrived, and the generation says so.
            new |= {"readyToUse": True, "observedGeneration": status.get("observedGeneration", 0)}
            new["conditions"] = status["conditions"]
        await self._writes.status(obj, new)
        if new["error"]["attempts"] == 1:
            await self._kube.event(obj, failure.reason, redact(failure.message, 512), type="Warning", action="Change")
        return snapshot_status.wait_left(new, now)

    async def _confirm(self, obj: Object, snapshot: Snapshot) -> float | None:
        """Its time is over by the status; the store may have been told another since."""
        pods = self._stores.pods(snapshot.namespace, snapshot.model)
        snapshot_id = (obj.get("status") or {})["snapshotID"]
        for pod in pods:
            try:
                record = await self._engines.snapshot(pod, snapshot_id)
            except EngineError:
                continue
            if record.expires is None or record.expires > self._clock().timestamp():
                return await self._store(obj, snapshot, [record], pod, taken=False)
        return await self._lost(obj, snapshot)

    async def _lost(self, obj: Object, snapshot: Snapshot) -> float | None:
        if snapshot.published:
            return None if await self._writes.take_out_of_view(obj) else SOON_S
        status = snapshot_status.gone(obj.get("status") or {}, snapshot.generation, self._clock())
        if await self._writes.status(obj, status):
            said = status["conditions"][0]
            kind = "Normal" if said["reason"] == "Expired" else "Warning"
            await self._kube.event(obj, said["reason"], said["message"], type=kind, action="Observe")
        return None

    async def _store(
        self, obj: Object, snapshot: Snapshot, records: Sequence[StoredSnapshot], pod: EnginePod, *, taken: bool
    ) -> float | None:
        try:
            engine = await self._engines.status(pod)
        except EngineError:
            engine = None
        policy = self._stores.of_snapshot(obj)
        before = {name: value for name, value in (obj.get("status") or {}).items() if name != "error"}
        status = snapshot_status.stored(
            records,
            before,
            generation=snapshot.generation,
            branch=snapshot.conversation.branch if snapshot.conversation is not None else None,
            origin=Origin(policy, engine, pod if taken else None),
            now=self._clock(),
        )
        known = {entry["snapshotID"]: entry for entry in before.get("boundaries") or ()}
        known |= {entry["snapshotID"]: entry for entry in status["boundaries"]}
        status["boundaries"] = list(known.values())[-snapshot_status.MAX_BOUNDARIES :]
        await self._writes.status(obj, status)
        return self._expires_in({"status": status})

    # Ends

    async def _refuse(self, obj: Object, error: Exception) -> float | None:
        """A shape that no schema should have let in. It can always be deleted."""
        metadata, status = obj["metadata"], obj.get("status") or {}
        if "deletionTimestamp" in metadata:
            return None if await self._writes.finalizers(obj, hold=False) else SOON_S
        if status.get("observedGeneration") == metadata.get("generation") and status.get("phase") == "Failed":
            return None
        generation, text = metadata.get("generation", 1), redact(str(error), 512)
        new = snapshot_status.failed(status, "InvalidSpec", text, generation, self._clock(), phase="Failed")
        await self._writes.status(obj, new)
        return None

    def _stop_waiting(self, namespace: str, model: str, name: str) -> None:
        names = self._waiting.get((namespace, model))
        if names is not None:
            names.discard(name)
            if not names:
                del self._waiting[namespace, model]
