"""Questions to engines whose answers decide about data: what counts as proof that something is gone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

from engram_operator.builders.settings import ENGINE
from engram_operator.engines import (
    EngineError,
    EngineNotFound,
    EnginePod,
    EngineStatus,
    SaveRequest,
    SnapshotPage,
    StoredSnapshot,
)
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.kinds import PODS

STORE_FLAG = "--snapshot-store"
PAGE = 500


class AsksSnapshots(Protocol):
    """The calls of engines.Engines that Snapshots need."""

    async def status(self, pod: EnginePod) -> EngineStatus: ...
    async def snapshots(self, pod: EnginePod, *, limit: int = PAGE, after: str | None = None) -> SnapshotPage: ...
    async def snapshot(self, pod: EnginePod, snapshot_id: str) -> StoredSnapshot: ...
    async def save(self, pod: EnginePod, request: SaveRequest) -> tuple[StoredSnapshot, ...]: ...
    async def change(
        self, pod: EnginePod, snapshot_id: str, *, pinned: bool = ..., ttl_seconds: int | None = ...
    ) -> StoredSnapshot: ...
    async def delete(self, pod: EnginePod, snapshot_id: str) -> int: ...


def capture_tag(uid: str) -> str:
    """Marks in the store what was saved for one Snapshot object, so that a lost answer is found again."""
    return f"snapshot-{uid}"


async def find_tagged(engines: AsksSnapshots, pods: Iterable[EnginePod], tag: str) -> list[StoredSnapshot]:
    """Among the newest: a lost answer is a moment old. EngineError when no pod could be asked."""
    failure: EngineError | None = None
    for pod in pods:
        try:
            page = await engines.snapshots(pod, limit=PAGE)
        except EngineError as error:
            failure = error
            continue
        return [record for record in page.snapshots if record.tag == tag]
    if failure is not None:
        raise failure
    return []


async def would_know(kube: Kube, engines: AsksSnapshots, pod: EnginePod, obj: Object) -> bool:
    """Whether this engine's "there is none" means that the snapshot is gone.

    An engine knows only the store that it was started with, and there only snapshots of its own state_abi: during a
    rollout, or after another model or policy, it has never heard of what is still there.
    """
    status = obj.get("status") or {}
    abi, uri = (status.get("compatibility") or {}).get("stateABI"), status.get("uri")
    if abi is not None:
        try:
            if (await engines.status(pod)).state_abi != abi:
                return False
        except EngineError:
            return False
    if uri is None:
        return True
    live = await kube.get(PODS, pod.name, pod.namespace)
    if live is None or live["metadata"].get("uid") != pod.uid:
        return False
    args = next((c.get("args") or [] for c in live["spec"].get("containers") or () if c["name"] == ENGINE), [])
    store = next((str(after) for flag, after in itertools.pairwise(args) if flag == STORE_FLAG), None)
    if store is None:
        return False
    # A claim is a folder inside the pod; which claim it is, the policy says.
    prefix = "pvc://" if store.startswith("file://") else store.rstrip("/") + "/"
    return str(uri).startswith(prefix)


async def is_gone(
    kube: Kube, engines: AsksSnapshots, pods: Iterable[EnginePod], obj: Object, snapshot_id: str
) -> bool | None:
    """True: proven. False: it is there. None: nobody could tell."""
    for pod in pods:
        try:
            await engines.snapshot(pod, snapshot_id)
        except EngineNotFound:
            if await would_know(kube, engines, pod, obj):
                return True
        except EngineError:
            continue
        else:
            return False
    return None
