"""The whole operator against an API server on loopback, with a controller that is small enough to reason about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from engram_operator.app import App
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object, fingerprint
from engram_operator.kube.kinds import MODELS, SERVICES, Kind
from engram_operator.kube.transport import ApiTransport
from engram_operator.settings import OperatorSettings
from tests.support.miniapi import MiniApi

MODEL: Object = {
    "apiVersion": "engram.dev/v1alpha1",
    "kind": "EngramModel",
    "metadata": {"name": "tiny", "namespace": "default"},
    "spec": {"model": {"uri": "hf://org/tiny"}},
}

SOON_S = 60.0  # at once, unless the machine is busy; half of what the next regular audit would take


def model(name: str = "tiny", **spec: Any) -> Object:
    return {**MODEL, "metadata": {**MODEL["metadata"], "name": name}, "spec": {**MODEL["spec"], **spec}}


class ServiceController:
    """A Service for every model, and a status that says how many replicas were asked for: written when they differ."""

    kind: Kind = MODELS

    def __init__(self, kube: Kube, cache: Cache) -> None:
        self.kube, self.cache = kube, cache
        self.looks: list[str] = []
        self.before_write: Callable[[], Awaitable[None]] | None = None

    async def reconcile(self, namespace: str, name: str) -> float | None:
        self.looks.append(name)
        found = self.cache.get(MODELS, namespace, name)
        if found is None:
            return None
        uid, replicas = found["metadata"]["uid"], found["spec"]["replicas"]
        wanted = self.service(found)
        live = self.cache.get(SERVICES, namespace, name)
        if live is None or fingerprint(live["spec"]) != fingerprint(wanted["spec"]):
            if self.before_write is not None:
                await self.before_write()
            await self.kube.apply(wanted)
        if (found.get("status") or {}).get("desiredReplicas") != replicas:
            await self.kube.apply_status(MODELS, name, namespace, {"desiredReplicas": replicas}, uid=uid)
        return None

    @staticmethod
    def service(found: Object) -> Object:
        metadata = found["metadata"]
        owner = {"apiVersion": found["apiVersion"], "kind": "EngramModel", "name": metadata["name"]}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "labels": {"app.kubernetes.io/managed-by": "engram-operator"},
                "ownerReferences": [{**owner, "uid": metadata["uid"], "controller": True}],
            },
            "spec": {"selector": {"model": metadata["name"]}, "ports": [{"port": 8000, "protocol": "TCP"}]},
        }


def make(api: MiniApi, **changes: Any) -> tuple[App, ServiceController]:
    """An operator for this server, not yet running. `changes` are of its settings."""
    values: dict[str, Any] = {"image": "engine:1", "identity": "op-0", "metrics_port": 0, **changes}
    transport = ApiTransport(api.load)
    app = App(Kube(transport), OperatorSettings(**values), transport.watch_session, retry_s=0.2)
    controller = ServiceController(app.kube, app.cache)
    app.add([controller])
    return app, controller


@asynccontextmanager
async def running(app: App, *, fails: bool = False) -> AsyncIterator[asyncio.Task[None]]:
    """Run it; afterwards it has ended in an orderly way, or, when it `fails`, however it did."""
    stop = asyncio.Event()
    task = asyncio.create_task(app.run(stop))
    try:
        yield task
    finally:
        stop.set()
        done, _ = await asyncio.wait({task}, timeout=240)
        await app.kube.close()
        assert done, "the operator did not stop"
        if not fails:
            task.result()


def at_rest(app: App) -> bool:
    """Nothing is being reconciled, and nothing is due."""
    return not app.queue._busy and not app.queue.depth


async def until(condition: Callable[[], Any], seconds: float = SOON_S, task: asyncio.Task[Any] | None = None) -> Any:
    """The condition's first true value. A task that ends first is the error."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        if task is not None and task.done():
            task.result()
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")
