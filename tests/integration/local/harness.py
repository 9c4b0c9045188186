"""Runs the local mode in this process, with the stand-in as the engine, and watches its events."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from engram_operator.local.endpoints import EndpointsFile
from engram_operator.local.events import Event
from engram_operator.local.plan import LocalPod, Machine
from engram_operator.local.secrets import LocalSecrets
from engram_operator.local.up import ADMIN_OFFSET, LocalCluster, plan_pods
from engram_operator.resources import Schemas, load_files
from tests.support import loopback
from tests.support.ports import free_base

STAND_IN = Path(__file__).with_name("stand_in.py")
FAST = {"periodSeconds": 0.05, "timeoutSeconds": 60}  # a stand-in that is late on a busy machine is not unwell
STARTS = {**FAST, "failureThreshold": 10_000}


def manifest(
    tmp_path: Path,
    *,
    name: str = "tiny",
    replicas: int = 1,
    args: list[str] | None = None,
    init: list[str] | None = None,
    grace: float = 10,
    engine: dict[str, Any] | None = None,
    **spec: Any,
) -> list[dict[str, Any]]:
    """A model whose engine is the stand-in and whose init container is `init` (default: true), and a policy."""
    (tmp_path / "model").mkdir(exist_ok=True)
    container = {
        "name": "engine",
        "command": [sys.executable, str(STAND_IN)],
        "startupProbe": STARTS,
        "readinessProbe": FAST,
        "livenessProbe": {**FAST, "failureThreshold": 3},
        **(engine or {}),
    }
    model = {
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "EngramModel",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": f"file://{tmp_path}/model"},
            "replicas": replicas,
            "accelerator": {"resourceName": ""},
            "engine": {"args": args or []},
            "podTemplate": {
                "spec": {
                    "terminationGracePeriodSeconds": grace,
                    "initContainers": [{"name": "model", "command": init or ["true"]}],
                    "containers": [container],
                }
            },
            **spec,
        },
    }
    policy = {
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "SnapshotPolicy",
        "metadata": {"name": "default"},
        "spec": {"storage": {"uri": f"file://{tmp_path}/store"}},
    }
    return [model, policy]


def free_port_base(replicas: int = 1) -> int:
    """A base whose ports, and those 1000 above, are free now."""
    return free_base([index + offset for index in range(replicas) for offset in (0, ADMIN_OFFSET)])


class Up:
    """`engram up` of the given documents. Use as an async context manager; leaving it drains."""

    def __init__(
        self,
        tmp_path: Path,
        documents: list[dict[str, Any]],
        *,
        port_base: int | None = None,
        secrets: dict[tuple[str, str], str] | None = None,
    ) -> None:
        path = tmp_path / "engram.yaml"
        path.write_text(yaml.safe_dump_all(documents))
        replicas = sum(item["spec"].get("replicas", 1) for item in documents if item["kind"] == "EngramModel")
        self.state = tmp_path / "state"
        machine = Machine(self.state, dict(os.environ), LocalSecrets(self.state, secrets or {}))
        base = port_base if port_base is not None else free_port_base(replicas)
        self.pods: list[LocalPod] = plan_pods(load_files([path], Schemas.load()), machine, base, [])
        self.events: list[Event] = []
        self.endpoints_path = self.state / "endpoints.json"
        self.cluster = LocalCluster(self.pods, EndpointsFile(self.endpoints_path), self.events.append)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Up:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        if not self._task.done():
            self.cluster.stop()
            if kind is not None:
                self.cluster.stop()
        await self._task

    def start(self) -> None:
        self._task = asyncio.create_task(self.cluster.run(handle_signals=False))

    async def finished(self) -> None:
        assert self._task is not None
        await asyncio.wait_for(asyncio.shield(self._task), 240)

    async def until(self, condition: Callable[[], Any], timeout: float = 240) -> Any:
        """Wait for a true value; fails with the events so far."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if value := condition():
                return value
            assert self._task is not None
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.02)
        raise AssertionError("not in time; events:\n" + "\n".join(map(str, self.events)))

    async def event(self, reason: str, count: int = 1, subject: str = "") -> Event:
        def found() -> Event | None:
            matching = [e for e in self.events if e.reason == reason and e.subject.endswith(subject)]
            return matching[count - 1] if len(matching) >= count else None

        event = await self.until(found)
        assert isinstance(event, Event)
        return event

    def reasons(self, subject: str = "") -> list[str]:
        return [event.reason for event in self.events if event.subject.endswith(subject)]

    def endpoints(self, model: str = "tiny") -> list[str] | None:
        """Names of the published replicas; None when the model is not in the file."""
        try:
            entry = json.loads(self.endpoints_path.read_text())["models"].get(model)
        except FileNotFoundError:
            return None
        return None if entry is None else [endpoint["name"] for endpoint in entry["endpoints"]]


def about(pod: LocalPod) -> dict[str, Any]:
    """What the stand-in says of itself."""
    answer: dict[str, Any] = loopback.get(f"{pod.url}/about", trust_env=False).json()
    return answer


def tell(pod: LocalPod, **answers: int) -> None:
    loopback.post(f"{pod.url}/set", params=answers, trust_env=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def running(pid: int) -> bool:
    """Alive and not a zombie: whoever is its parent now may not have reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return alive(pid)
