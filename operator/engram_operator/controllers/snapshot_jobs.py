"""Hands the news of a Job of ours on to those it works for. A Job is nobody's child: it outlives who it works for."""

from __future__ import annotations

from engram_operator.controllers.erase import Eraser, is_at_work
from engram_operator.controllers.types import Enqueue
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Object
from engram_operator.kube.kinds import JOBS, POLICIES, SNAPSHOTS, Kind


class SnapshotJobs:
    def __init__(self, cache: Cache, eraser: Eraser, enqueue: Enqueue) -> None:
        self._cache = cache
        self._eraser = eraser
        self._enqueue = enqueue
        self._seen: dict[tuple[str, str], Object] = {}  # erasing, and not ended

    @property
    def kind(self) -> Kind:
        return JOBS

    async def reconcile(self, namespace: str, name: str) -> float | None:
        job = self._cache.get(JOBS, namespace, name)
        if job is None:
            # Somebody deleted it, or its namespace is ending: nobody else tells those who wait for it.
            vanished = self._seen.pop((namespace, name), None)
            for snapshot in self._eraser.waiting_behind(vanished) if vanished is not None else ():
                self._enqueue(SNAPSHOTS, namespace, snapshot)
            return None
        self._seen.pop((namespace, name), None)
        if is_at_work(job):
            self._seen[namespace, name] = job
        for snapshot in self._eraser.waiting_for(job):
            self._enqueue(SNAPSHOTS, namespace, snapshot)
        policy = (job["metadata"].get("annotations") or {}).get("engram.dev/policy")
        if policy is not None:
            self._enqueue(POLICIES, namespace, policy)
        return None
