"""The snapshot controllers with a cluster in memory and engines on loopback, under a clock of the test's own.

No call to an engine is ever late: where one says nothing, the call's deadline is skipped.

async with SnapshotWorld(tmp_path) as world:
    world.policy(); world.model("m"); world.pod("m", 0)
    await world.settle()
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engram_operator.controllers.snapshots import snapshot_controllers
from engram_operator.engines import Engines
from engram_operator.kube.kinds import JOBS, MODELS, PODS, SNAPSHOTS, STATEFULSETS, Kind
from engram_operator.resources import Schemas
from engram_operator.settings import OperatorSettings
from tests.support import patience
from tests.support.fake_engine_admin import BUCKET, FakeEngineAdmin, FakeStore, loopback_addresses
from tests.support.fake_kube import FakeKube
from tests.support.kube_store import Change, KubeStore
from tests.support.loop_time import LoopTime

START = datetime(2025, 10, 9, 8, 54, tzinfo=UTC)
NS = "default"
Key = tuple[str, str, str]


class SnapshotWorld:
    def __init__(self, folder: Path) -> None:
        self.now = START
        self.store = KubeStore(clock=lambda: self.now)
        self.kube = FakeKube(self.store)
        self.bucket = FakeStore()
        self.engines: dict[str, FakeEngineAdmin] = {}  # by pod
        self.looks: Counter[str] = Counter()  # by controller
        self._folder = folder
        self._addresses = loopback_addresses()
        self._port = 0
        self._ready: dict[Key, None] = {}
        self._timers: list[tuple[datetime, int, Key]] = []
        self._count = itertools.count()

    async def __aenter__(self) -> SnapshotWorld:
        token = self._folder / "token"
        token.write_text("token-1")
        first = FakeEngineAdmin(self.bucket, host=next(self._addresses))
        await first.__aenter__()  # takes a free port, which the others share
        self._port, self._spare = first.port, first
        self._time = LoopTime()
        self.client = Engines(
            token,
            port=self._port,
            read_s=patience.SECONDS,
            change_s=patience.SECONDS,
            save_s=2 * patience.SECONDS,
            sweep_s=2 * patience.SECONDS,
            connect_s=patience.SECONDS,
            clock=lambda: self.now.timestamp(),
        )
        self._begin()
        self.store.listeners.append(self._changed)
        return self

    def _begin(self) -> None:
        settings = OperatorSettings(image="engine:1", identity="test")
        made = snapshot_controllers(
            self.kube,
            self.kube.cache,
            settings,
            lambda: self.now,
            self.client,
            self.enqueue,
            Schemas.load(),
        )
        self.controllers = {type(controller).__name__: controller for controller in made}

    async def restart(self) -> None:
        """Another operator, which knows nothing but the cluster."""
        self._ready.clear()
        self._timers.clear()
        self._begin()
        for (kind, namespace, name), _ in self.store.objects.items():
            self.enqueue(kind, namespace, name)

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for engine in [*self.engines.values(), self._spare]:
            await engine.__aexit__()

    # Events and time

    def enqueue(self, kind: Kind, namespace: str, name: str) -> None:
        for controller in self.controllers.values():
            if controller.kind == kind:
                self._ready[type(controller).__name__, namespace, name] = None

    def _changed(self, change: Change) -> None:
        metadata = change.object["metadata"]
        self.enqueue(change.kind, metadata.get("namespace", ""), metadata["name"])
        if change.kind == PODS and (model := metadata.get("labels", {}).get("app.kubernetes.io/instance")):
            self.enqueue(MODELS, NS, model)

    async def settle(self, seconds: float = 0.0, looks: int = 5000) -> None:
        """Work until nothing is due for `seconds` more. AssertionError for work without end."""
        end = self.now + timedelta(seconds=seconds)
        done = 0
        while True:
            while self._ready:
                key = next(iter(self._ready))
                del self._ready[key]
                done += 1
                assert done < looks, f"no end of work; last: {key}"
                wait = await self.controllers[key[0]].reconcile(key[1], key[2])
                self.looks[key[0]] += 1
                if wait is not None:
                    due = self.now + timedelta(seconds=wait)
                    heapq.heappush(self._timers, (due, next(self._count), key))
            if await self.finish_calls():
                continue
            if not self._timers or self._timers[0][0] > end:
                break
            due, _, key = heapq.heappop(self._timers)
            self.now = max(self.now, due)
            self._ready[key] = None
        self.now = max(self.now, end)

    async def finish_calls(self) -> bool:
        """Until what controllers have running beside their looks is done; whether there was anything."""
        running = [task for task in asyncio.all_tasks() if task.get_name() == "background"]
        if running:
            await asyncio.wait(running)
            await asyncio.sleep(0)
        return bool(running)

    # What there is

    def policy(self, name: str = "default", **spec: Any) -> dict[str, Any]:
        storage = {"uri": BUCKET, "credentialsSecretRef": {"name": "s3"}}
        obj = {
            "apiVersion": "engram.dev/v1alpha1",
            "kind": "SnapshotPolicy",
            "metadata": {"name": name, "namespace": NS},
            "spec": {"storage": storage, **spec},
        }
        return self.kube.put(obj)

    def model(self, name: str = "m", **spec: Any) -> dict[str, Any]:
        model = self.kube.put(
            {
                "apiVersion": "engram.dev/v1alpha1",
                "kind": "EngramModel",
                "metadata": {"name": name, "namespace": NS},
                "spec": {"model": {"uri": "hf://org/repo"}, **spec},
            }
        )
        self.kube.put(
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {
                    "name": name,
                    "namespace": NS,
                    "labels": {"app.kubernetes.io/managed-by": "engram-operator"},
                },
                "spec": {"replicas": 1},
            }
        )
        return model

    async def pod(
        self, model: str = "m", ordinal: int = 0, *, store: str = BUCKET, ready: bool = True
    ) -> FakeEngineAdmin:
        """A replica, and its engine behind it."""
        name = f"{model}-{ordinal}"
        engine = FakeEngineAdmin(self.bucket, host=next(self._addresses), port=self._port)
        engine.silent = lambda: self._time.skip(2 * patience.SECONDS)
        await engine.__aenter__()
        self.engines[name] = engine
        stateful_set = self.kube.find(STATEFULSETS, NS, model)
        assert stateful_set is not None
        self.kube.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": NS,
                    "labels": {"app.kubernetes.io/name": "engram-engine", "app.kubernetes.io/instance": model},
                    "ownerReferences": [
                        {
                            "apiVersion": "apps/v1",
                            "kind": "StatefulSet",
                            "name": model,
                            "uid": stateful_set["metadata"]["uid"],
                            "controller": True,
                        }
                    ],
                },
                "spec": {"containers": [{"name": "engine", "args": ["serve", "--snapshot-store", store]}]},
                "status": {
                    "phase": "Running",
                    "podIP": engine.host,
                    "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
                },
            }
        )
        return engine

    async def lose_pod(self, name: str) -> None:
        self.kube.remove(PODS, NS, name)
        await self.engines.pop(name).__aexit__()

    def request(self, name: str = "s", conversation: str = "my chat", **spec: Any) -> dict[str, Any]:
        """A user's `kubectl apply` of a Snapshot to be taken now."""
        source = {"conversation": {"id": conversation}}
        return self.kube.put(self._snapshot(name, {"modelRef": {"name": "m"}, "source": source, **spec}))

    def adopt(self, name: str, snapshot_id: str, **spec: Any) -> dict[str, Any]:
        source = {"snapshotID": snapshot_id}
        return self.kube.put(self._snapshot(name, {"modelRef": {"name": "m"}, "source": source, **spec}))

    def _snapshot(self, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        metadata = {"name": name, "namespace": NS}
        return {"apiVersion": "engram.dev/v1alpha1", "kind": "Snapshot", "metadata": metadata, "spec": spec}

    def delete(self, name: str) -> None:
        self.kube.remove(SNAPSHOTS, NS, name)

    # What became of it

    def snapshot(self, name: str = "s") -> dict[str, Any] | None:
        return self.kube.find(SNAPSHOTS, NS, name)

    def status(self, name: str = "s") -> dict[str, Any]:
        found = self.snapshot(name)
        assert found is not None, f"there is no Snapshot {name}"
        return found.get("status") or {}

    def names(self) -> list[str]:
        return [obj["metadata"]["name"] for obj in self.kube.all(SNAPSHOTS, NS)]

    def condition(self, name: str = "s", kind: str = "Ready") -> tuple[str, str]:
        found = next(entry for entry in self.status(name)["conditions"] if entry["type"] == kind)
        return found["status"], found["reason"]

    def jobs(self) -> list[dict[str, Any]]:
        return self.kube.all(JOBS, NS)

    def end_job(self, name: str, *, failed: str | None = None, message: str = "") -> None:
        """As the Job controller and a kubelet do: its pod ended with `message`."""
        job = self.kube.find(JOBS, NS, name)
        assert job is not None
        labels = {**job["spec"]["template"]["metadata"]["labels"], "job-name": name}
        ended = {"exitCode": 0 if failed is None else 1, "message": message}
        self.kube.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{name}-x", "namespace": NS, "labels": labels},
                "spec": {"containers": [{"name": "snapshots"}]},
                "status": {
                    "phase": "Succeeded" if failed is None else "Failed",
                    "containerStatuses": [{"name": "snapshots", "state": {"terminated": ended}}],
                },
            }
        )
        entry = {"type": "Complete" if failed is None else "Failed", "status": "True", "message": failed or ""}
        entry["lastTransitionTime"] = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        self.kube.set_status(JOBS, NS, name, {"conditions": [entry]})
