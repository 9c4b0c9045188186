"""Resources to running pods: build, plan, check the machine, run until told to stop, publish who is ready."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from engram_operator.builders import BuildSettings, desired
from engram_operator.errors import ResourceError
from engram_operator.local.endpoints import Endpoint, EndpointsFile
from engram_operator.local.events import Event, EventSink
from engram_operator.local.plan import LocalPod, Machine, gpus_needed, plan_pod
from engram_operator.local.pod import PodRunner
from engram_operator.resources import EngramModel, Resources, select_policy

ADMIN_OFFSET = 1000  # replica i: http on base + i, admin on base + 1000 + i


def plan_pods(resources: Resources, machine: Machine, port_base: int, gpus: Sequence[str]) -> list[LocalPod]:
    """Every replica of every model. ResourceError with all problems, each naming its model."""
    settings = BuildSettings(image=f"engram-runtime:{metadata.version('engram-platform')}", local=True)
    problems: list[str] = []
    pods: list[LocalPod] = []
    free = list(gpus)
    wanted = 0
    owners: dict[str, EngramModel] = {}
    for model in resources.models:
        where = f'EngramModel "{model.name}"'
        if (first := owners.setdefault(model.served_name, model)) is not model:
            problems.append(f'{where}: spec.model.name: "{model.served_name}" is also the name of "{first.name}"')
            continue
        try:
            objects = desired(model, select_policy(model, resources.policies), settings)
            stateful_set = next(item for item in objects if item["kind"] == "StatefulSet")
            each = gpus_needed(stateful_set)
            for ordinal in range(stateful_set["spec"]["replicas"]):
                wanted += each
                given = tuple(free.pop(0) for _ in range(each)) if len(free) >= each else None
                if given is None:
                    continue
                index = len(pods)
                pods.append(
                    plan_pod(
                        stateful_set,
                        ordinal,
                        model=model.served_name,
                        http_port=port_base + index,
                        admin_port=port_base + ADMIN_OFFSET + index,
                        gpus=given,
                        machine=machine,
                    )
                )
        except ResourceError as error:
            problems += error.within(where).problems
    if wanted > len(gpus):
        problems.append(
            f"spec.accelerator.resourceName: the pods need {wanted} nvidia.com/gpu, this machine has {len(gpus)};"
            ' resourceName: "" runs on the CPU'
        )
    if len(pods) > ADMIN_OFFSET or port_base + ADMIN_OFFSET + len(pods) > 65536:
        problems.append(f"--port-base {port_base}: no room for {len(pods)} replicas below port 65536")
    if problems:
        raise ResourceError(problems)
    return pods


def notices(resources: Resources) -> list[Event]:
    """What the resources ask for that only a cluster has: said, so that nobody waits for it here."""
    events = []
    for model in resources.models:
        asked = {
            "spec.engine.image": model.engine.image is not None,
            "spec.scaleToZero": model.idle_seconds is not None,
            "spec.monitoring": model.monitoring.enabled,
            "spec.networkPolicy": model.network_policy.enabled,
        }
        if fields := [field for field, set_ in asked.items() if set_]:
            message = (
                f"{', '.join(fields)}: only in a cluster; here the installed engine runs, on loopback, until stopped"
            )
            events.append(Event(model.key, "Notice", "NotApplied", message))
        if model.suspend or model.replicas == 0:
            events.append(Event(model.key, "Notice", "Suspended" if model.suspend else "NoReplicas", "no pods"))
    return events


def nvidia_gpus(inherited: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """NVIDIA devices this process may hand out, as CUDA_VISIBLE_DEVICES takes them."""
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    numbers = [int(match[1]) for path in devices.glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", path.name))]
    return [str(number) for number in sorted(numbers)]


def check_ports(pods: Sequence[LocalPod]) -> None:
    """ResourceError naming each port that somebody else has."""
    problems = []
    for pod in pods:
        for port in (pod.http_port, pod.admin_port):
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError as error:
                    problems.append(f"port {port} of {pod.key}: {error.strerror}; choose another --port-base")
    if problems:
        raise ResourceError(problems)


class LocalCluster:
    """Runs planned pods together and keeps the endpoints file current."""

    def __init__(self, pods: Sequence[LocalPod], endpoints: EndpointsFile, emit: EventSink) -> None:
        self._endpoints = endpoints
        self._emit = emit
        self._ready: set[str] = set()
        self._stopping = False
        self._pods = list(pods)
        self._runners = [PodRunner(pod, emit, self._readiness_changed) for pod in pods]

    async def run(self, *, handle_signals: bool = True) -> None:
        """Until stop(). ResourceError when the machine is not free for these pods; nothing was started then."""
        self._endpoints.refuse_taken([pod.model for pod in self._pods])
        check_ports(self._pods)
        loop = asyncio.get_running_loop()
        try:
            for runner in self._runners:
                runner.acquire()
            if handle_signals:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                        loop.add_signal_handler(number, self.stop)
            async with asyncio.TaskGroup() as group:
                for runner in self._runners:
                    group.create_task(runner.run())
        finally:
            self._withdraw()
            for runner in self._runners:
                runner.release()

    def stop(self) -> None:
        """First call: drain. Second call: end now."""
        again, self._stopping = self._stopping, True
        self._withdraw()  # before the first pod hears of it, so that no new turn is sent to one
        for runner in self._runners:
            runner.hurry() if again else runner.stop()

    def _readiness_changed(self, pod: LocalPod, ready: bool) -> None:
        (self._ready.add if ready else self._ready.discard)(pod.key)
        if self._stopping:
            return
        entries = [
            Endpoint(other.name, other.url, other.admin_url)
            for other in self._pods
            if other.model == pod.model and other.key in self._ready
        ]
        try:
            self._endpoints.publish(pod.model, pod.namespace, entries)
        except OSError as error:  # a full disk must not take running engines down
            self._emit(Event(pod.key, "Notice", "EndpointsNotWritten", str(error)))

    def _withdraw(self) -> None:
        try:
            self._endpoints.withdraw(sorted({pod.model for pod in self._pods}))
        except OSError as error:
            self._emit(Event("endpoints", "Notice", "EndpointsNotWritten", str(error)))
