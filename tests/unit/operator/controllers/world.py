"""Kubernetes around a controller under test: it makes the pods of sets and deployments, and lets tests break them.

Coarse on purpose: one `settle` brings every set to what its spec says, at once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from engram_operator.controllers import ActivatorController, Held, ModelController
from engram_operator.engines import EngineStatus, EngineUnreachable, Waiting
from engram_operator.engines.types import SnapshotCounts, StoreCondition
from engram_operator.kube.client import fingerprint
from engram_operator.kube.kinds import DEPLOYMENTS, MODELS, PODS, STATEFULSETS, Kind
from engram_operator.settings import OperatorSettings, RollPolicy
from tests.support.fake_kube import FakeKube
from tests.support.kube_store import KubeStore
from tests.unit.operator.documents import SCHEMAS

SETTINGS = OperatorSettings(image="engine:1", identity="test", operator_namespace="engram", service_account="engram")
START = datetime(2026, 1, 1, tzinfo=UTC)
NS = "default"


class FakeEngines:
    """Answers of engines and activators, by pod name."""

    def __init__(self) -> None:
        self.idle = 0.0
        self.running = 0
        self.silent = False
        self.store: StoreCondition | None = StoreCondition(True, "", "")
        self.counts: SnapshotCounts | None = SnapshotCounts(3, 300, 1.0, None, None)
        self.held: dict[str, int] = {}
        self.asked: list[str] = []

    async def status(self, pod: Any) -> EngineStatus:
        self.asked.append(pod.name)
        if self.silent:
            raise EngineUnreachable("nobody there")
        return EngineStatus(
            phase="ready",
            state_abi="abi",
            model_digest="digest",
            architecture="llama",
            weight_bytes=10,
            state_bytes=5,
            running=self.running,
            waiting=0,
            idle_seconds=self.idle,
            version="1",
            dtype="float32",
            store=self.store,
            snapshots=self.counts,
        )

    async def waiting(self, pod: Any) -> Mapping[str, Waiting]:
        self.asked.append(pod.name)
        if self.silent:
            raise EngineUnreachable("nobody there")
        return {name: Waiting(count, 1.0) for name, count in self.held.items()}


class World:
    def __init__(self, **settings: Any) -> None:
        self.now = START
        self.kube = FakeKube(KubeStore(clock=lambda: self.now))
        self.engines = FakeEngines()
        self.settings = settings
        self.queued: set[tuple[Kind, str, str]] = set()
        self.restart()

    def restart(self, image: str = "engine:1", roll: RollPolicy = RollPolicy.ON_SPEC_CHANGE) -> None:
        """A fresh operator process, of this version."""
        chosen = OperatorSettings(
            image=image,
            identity="test",
            operator_namespace="engram",
            service_account="engram",
            roll_policy=roll,
            **self.settings,
        )
        held = Held()
        self.models = ModelController(
            self.kube, self.kube.cache, chosen, lambda: self.now, self.engines, held, self.enqueue, SCHEMAS
        )
        self.activators = ActivatorController(self.kube, self.kube.cache, chosen, self.engines, held, self.enqueue)

    def enqueue(self, kind: Kind, namespace: str, name: str) -> None:
        self.queued.add((kind, namespace, name))

    def model(self, name: str = "m", uri: str = "hf://org/repo", **spec: Any) -> dict[str, Any]:
        source = {"uri": uri, **spec.pop("model", {})}
        body = {"apiVersion": "engram.dev/v1alpha1", "kind": "EngramModel", "metadata": {"name": name}}
        return self.kube.put({**body, "spec": {"model": source, **spec}})

    def policy(self, name: str = "default", uri: str = "pvc://memory", **spec: Any) -> dict[str, Any]:
        body = {"apiVersion": "engram.dev/v1alpha1", "kind": "SnapshotPolicy", "metadata": {"name": name}}
        return self.kube.put({**body, "spec": {"storage": {"uri": uri, **spec.pop("storage", {})}, **spec}})

    def later(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    async def look(self, name: str = "m") -> float | None:
        """One reconcile of the model, and of the activator when it was asked for."""
        again = await self.models.reconcile(NS, name)
        queued, self.queued = self.queued, set()
        for kind, namespace, other in queued:
            if kind is DEPLOYMENTS:
                await self.activators.reconcile(namespace, other)
        return again

    async def steady(self, name: str = "m", rounds: int = 12) -> None:
        """Looks, with pods coming and becoming ready in between, until nothing is written any more."""
        for _ in range(rounds):
            before = self.kube.store.version
            await self.look(name)
            self.settle()
            if self.kube.store.version == before:
                return
        raise AssertionError(f"still writing after {rounds} rounds: {self.kube.writes()[-6:]}")

    # What Kubernetes does

    def settle(self, *, ready: bool = True) -> None:
        for live in self.kube.all(STATEFULSETS, NS):
            self._settle_set(live, ready)
        for live in self.kube.all(DEPLOYMENTS, NS):
            name = f"{live['metadata']['name']}-abc"
            if self.kube.find(PODS, NS, name) is None:
                self._make_pod(name, live, live["spec"]["template"], "d", ready)
        for pod in self.kube.all(PODS, NS):
            owners = pod["metadata"]["ownerReferences"]
            if owners[0]["kind"] == "Deployment" and self.kube.find(DEPLOYMENTS, NS, owners[0]["name"]) is None:
                self.kube.remove(PODS, NS, pod["metadata"]["name"])

    def _settle_set(self, live: dict[str, Any], ready: bool) -> None:
        metadata, spec = live["metadata"], live["spec"]
        revision = f"{metadata['name']}-{fingerprint(spec['template'])[:8]}"
        wanted = {f"{metadata['name']}-{index}" for index in range(spec["replicas"])}
        for pod in self.pods(metadata["name"]):
            name = pod["metadata"]["name"]
            if name not in wanted or pod["metadata"]["labels"]["controller-revision-hash"] != revision:
                self.kube.remove(PODS, NS, name)
        for name in sorted(wanted):
            if self.kube.find(PODS, NS, name) is None:
                self._make_pod(name, live, spec["template"], revision, ready)
        status = {
            "observedGeneration": metadata["generation"],
            "replicas": spec["replicas"],
            "currentRevision": revision,
            "updateRevision": revision,
        }
        if (live.get("status") or {}) != status:
            self.kube.set_status(STATEFULSETS, NS, metadata["name"], status)

    def _make_pod(self, name: str, owner: dict[str, Any], template: dict[str, Any], revision: str, ready: bool) -> None:
        metadata = copy.deepcopy(template["metadata"])
        metadata |= {"name": name, "namespace": NS}
        metadata["labels"]["controller-revision-hash"] = revision
        metadata["ownerReferences"] = [
            {
                "apiVersion": "apps/v1",
                "kind": owner["kind"],
                "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"],
                "controller": True,
            }
        ]
        spec = {**template["spec"], "nodeName": "node"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self.kube.put({**pod, "status": running() if ready else loading()})

    def pods(self, name: str = "m") -> list[dict[str, Any]]:
        labels = {"app.kubernetes.io/name": "engram-engine", "app.kubernetes.io/instance": name}
        return [pod for pod in self.kube.all(PODS, NS) if labels.items() <= pod["metadata"]["labels"].items()]

    # What tests ask

    def status(self, name: str = "m") -> dict[str, Any]:
        found = self.kube.find(MODELS, NS, name)
        assert found is not None
        status: dict[str, Any] = found["status"]
        return status

    def condition(self, kind: str, name: str = "m") -> tuple[str, str, str]:
        entry = next(entry for entry in self.status(name)["conditions"] if entry["type"] == kind)
        return entry["status"], entry["reason"], entry["message"]

    def stateful_set(self, name: str = "m") -> dict[str, Any]:
        found = self.kube.find(STATEFULSETS, NS, name)
        assert found is not None
        return found


def running(ip: str = "10.0.0.1") -> dict[str, Any]:
    """Status of a pod that serves."""
    times = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {
        "phase": "Running",
        "podIP": ip,
        "conditions": [{"type": kind, "status": "True", **times} for kind in ("PodScheduled", "Initialized", "Ready")],
        "initContainerStatuses": [{"name": "model", "restartCount": 0, "state": {"terminated": {"exitCode": 0}}}],
        "containerStatuses": [
            {"name": "engine", "restartCount": 0, "ready": True, "started": True, "state": {"running": {}}}
        ],
    }


def loading() -> dict[str, Any]:
    """Status of a pod whose engine loads the model."""
    status = running()
    status["conditions"][2] |= {"status": "False", "reason": "ContainersNotReady"}
    status["containerStatuses"][0] |= {"ready": False, "started": False}
    return status
