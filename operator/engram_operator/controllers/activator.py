"""The activator of a namespace: there while a model may sleep, asked once a second while one does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from engram_operator.builders import activator, naming
from engram_operator.controllers.apply import Applier, StillGoing
from engram_operator.controllers.sleep import ASK_SECONDS, is_asleep, is_routed
from engram_operator.controllers.types import Enqueue, build_settings
from engram_operator.engines import EngineError, EnginePod, engine_pods
from engram_operator.engines.types import WaitingByModel
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.kinds import DEPLOYMENTS, MODELS, PODS, SERVICE_ACCOUNTS, SERVICES, STATEFULSETS, Kind
from engram_operator.settings import OperatorSettings


class AsksActivators(Protocol):
    async def waiting(self, pod: EnginePod) -> WaitingByModel: ...


class Held:
    """Requests that activators hold, as of the last answer. What is not in it is not known."""

    def __init__(self) -> None:
        self._found: dict[str, Mapping[str, int]] = {}

    def of(self, namespace: str, model: str) -> int | None:
        """None: the namespace's activator has not answered."""
        found = self._found.get(namespace)
        return None if found is None else found.get(model, 0)

    def learn(self, namespace: str, found: Mapping[str, int] | None) -> None:
        if found is None:
            self._found.pop(namespace, None)
        else:
            self._found[namespace] = found


class ActivatorController:
    """Key: the Deployment's name in its namespace, whether it exists or not."""

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        settings: OperatorSettings,
        engines: AsksActivators,
        held: Held,
        enqueue: Enqueue,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._build = build_settings(settings)
        self._engines = engines
        self._held = held
        self._enqueue = enqueue
        self._applier = Applier(kube, cache)

    @property
    def kind(self) -> Kind:
        return DEPLOYMENTS

    async def reconcile(self, namespace: str, name: str) -> float | None:
        if name != naming.ACTIVATOR:
            return None
        owners = self._owners(namespace)
        if not owners:
            self._held.learn(namespace, None)
            await self._remove(namespace)
            return None
        try:
            for obj in activator(namespace, owners, self._build):
                await self._applier.ensure(obj)
        except StillGoing:
            return ASK_SECONDS
        if self._someone_sleeps(namespace):
            return await self._ask(namespace)
        self._held.learn(namespace, None)  # an old answer is worse than none
        return None

    def _owners(self, namespace: str) -> list[tuple[str, str]]:
        """Models that may sleep, or whose Service still points here."""
        found = []
        for model in self._cache.list(MODELS, namespace):
            metadata, spec = model["metadata"], model.get("spec") or {}
            wants = "scaleToZero" in spec and not spec.get("suspend") and not metadata.get("deletionTimestamp")
            if wants or is_routed(self._cache.get(SERVICES, namespace, metadata["name"])):
                found.append((metadata["name"], metadata["uid"]))
        return found

    def _someone_sleeps(self, namespace: str) -> bool:
        return any(
            is_asleep(self._cache.get(STATEFULSETS, namespace, model["metadata"]["name"]))
            or is_routed(self._cache.get(SERVICES, namespace, model["metadata"]["name"]))
            for model in self._cache.list(MODELS, namespace)
        )

    async def _ask(self, namespace: str) -> float:
        """Ask every pod of it, a rollout has two, and have those models looked at that someone waits for."""
        pods = engine_pods(self._cache.labelled(PODS, namespace, naming.activator_selector()))
        found: dict[str, int] = {}
        answered = False
        for pod in pods:
            try:
                answer = await self._engines.waiting(pod)
            except EngineError:
                continue
            answered = True
            for model, entry in answer.items():
                found[model] = found.get(model, 0) + entry.waiting
        self._held.learn(namespace, found if answered else None)
        for model, count in found.items():
            if count and self._cache.get(MODELS, namespace, model) is not None:
                self._enqueue(MODELS, namespace, model)
        return ASK_SECONDS

    async def _remove(self, namespace: str) -> None:
        for kind in (DEPLOYMENTS, SERVICE_ACCOUNTS):
            live = self._cache.get(kind, namespace, naming.ACTIVATOR)
            if live is not None and _ours(live) and not live["metadata"].get("deletionTimestamp"):
                await self._kube.delete(kind, naming.ACTIVATOR, namespace, uid=live["metadata"]["uid"])


def activator_is_ready(cache: Cache, namespace: str) -> bool:
    pods = engine_pods(cache.labelled(PODS, namespace, naming.activator_selector()))
    return any(pod.ready for pod in pods)


def _ours(live: Object) -> bool:
    labels: Mapping[str, Any] = live["metadata"].get("labels") or {}
    return labels.get("app.kubernetes.io/managed-by") == naming.MANAGER
