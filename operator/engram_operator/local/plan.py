"""A StatefulSet to plans of local pods: what to run, where, and what to put into its folders first.

Planning does everything that can fail on a wrong input, before any process starts. Every field of the pod is either
mapped, or listed here as one that only a cluster needs, or refused by name.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_operator.errors import ResourceError
from engram_operator.local.rewrite import Rewriter, expand
from engram_operator.local.secrets import LocalSecrets
from engram_operator.local.volumes import UNMAPPED, PodVolumes

# What one machine without a scheduler, an image and a security boundary of its own has no use for.
CLUSTER_ONLY_POD = frozenset(
    {
        "affinity", "automountServiceAccountToken", "enableServiceLinks", "imagePullSecrets", "nodeSelector",
        "priorityClassName", "runtimeClassName", "schedulerName", "securityContext", "serviceAccountName",
        "tolerations", "topologySpreadConstraints",
    }
)  # fmt: skip
MAPPED_POD = frozenset({"containers", "initContainers", "terminationGracePeriodSeconds", "volumes"})
CLUSTER_ONLY_CONTAINER = frozenset(
    {"image", "imagePullPolicy", "securityContext", "terminationMessagePath", "terminationMessagePolicy"}
)
MAPPED_CONTAINER = frozenset(
    {
        "args", "command", "env", "lifecycle", "livenessProbe", "name", "ports", "readinessProbe", "resources",
        "startupProbe", "volumeMounts",
    }
)  # fmt: skip
PORT_FLAGS = {"http": "--port", "admin": "--admin-port"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass(frozen=True, slots=True)
class Probe:
    """An HTTP probe. Times in seconds."""

    url: str
    headers: Mapping[str, str]
    initial_delay: float
    period: float
    timeout: float
    failures: int
    successes: int


@dataclass(frozen=True, slots=True)
class LocalContainer:
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None


@dataclass(frozen=True, slots=True)
class LocalPod:
    """`clear` are folders of this pod's own life, emptied first; `keep` outlive it; `files` are written 0600."""

    namespace: str
    name: str
    model: str  # served name
    folder: Path
    init: tuple[LocalContainer, ...]
    main: LocalContainer
    grace_seconds: float
    http_port: int
    admin_port: int
    clear: tuple[Path, ...]
    keep: tuple[Path, ...]
    files: Mapping[Path, bytes]

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"


@dataclass(frozen=True, slots=True)
class Machine:
    """What planning needs of this machine. `inherited`: the environment that stands for the image's."""

    state_dir: Path
    inherited: Mapping[str, str]
    secrets: LocalSecrets


def plan_pod(
    stateful_set: Mapping[str, Any],
    ordinal: int,
    *,
    model: str,
    http_port: int,
    admin_port: int,
    gpus: tuple[str, ...],
    machine: Machine,
) -> LocalPod:
    """One replica. `gpus` are the devices it may use. ResourceError names every field that cannot be mapped."""
    metadata, spec = stateful_set["metadata"], stateful_set["spec"]
    pod = spec["template"]["spec"]
    name = f"{metadata['name']}-{ordinal}"
    problems = [*_unmapped(pod)]
    if problems:
        raise ResourceError(problems)
    claims = {template["metadata"]["name"] for template in spec.get("volumeClaimTemplates") or []}
    volumes = PodVolumes(metadata["namespace"], name, machine.state_dir, machine.secrets)
    for claim in sorted(claims):
        volumes.keep_claim(claim, f"{claim}-{name}")
    for volume in pod.get("volumes") or []:
        volumes.add(volume)
    ports = {"http": http_port, "admin": admin_port}
    containers = []
    for container in [*(pod.get("initContainers") or []), *pod["containers"]]:
        try:
            containers.append(_container(container, volumes, ports, gpus, spec["template"]["metadata"], machine))
        except ResourceError as error:
            problems += error.problems
    if problems := [*volumes.problems, *problems]:
        raise ResourceError(problems)
    return LocalPod(
        namespace=metadata["namespace"],
        name=name,
        model=model,
        folder=volumes.folder,
        init=tuple(containers[:-1]),
        main=containers[-1],
        grace_seconds=pod.get("terminationGracePeriodSeconds", 30),
        http_port=http_port,
        admin_port=admin_port,
        clear=tuple(volumes.clear),
        keep=tuple(volumes.keep),
        files=volumes.files,
    )


def gpus_needed(stateful_set: Mapping[str, Any]) -> int:
    """GPUs of one replica. ResourceError for a device that is not an NVIDIA GPU."""
    count = 0
    for container in stateful_set["spec"]["template"]["spec"]["containers"]:
        for resource, amount in (container.get("resources", {}).get("limits") or {}).items():
            if resource == "nvidia.com/gpu":
                count += int(amount)
            elif "/" in resource:
                raise ResourceError([f"spec.accelerator.resourceName: {resource} cannot be given to a local process"])
    return count


def _container(
    container: Mapping[str, Any],
    volumes: PodVolumes,
    ports: Mapping[str, int],
    gpus: tuple[str, ...],
    pod_metadata: Mapping[str, Any],
    machine: Machine,
) -> LocalContainer:
    name = container["name"]
    where = f"spec.containers[{name}]"
    mounts = {}
    for mount in container.get("volumeMounts") or []:
        if (folder := volumes.mount(name, mount)) is not None:
            mounts[mount["mountPath"].rstrip("/")] = folder
    flags, numbers = {}, {}
    for port in container.get("ports") or []:
        local = ports.get(port.get("name", ""))
        if local is None:
            raise ResourceError([f"pod field {where}.ports[{port.get('name', port['containerPort'])}]{UNMAPPED}"])
        flags[PORT_FLAGS[port["name"]]] = (port["containerPort"], local)
        numbers[port["name"]] = numbers[port["containerPort"]] = local
    rewriter = Rewriter(mounts, flags)
    variables = _variables(container, volumes, pod_metadata, where)
    command = [expand(part, variables) for part in container.get("command") or []]
    arguments = [expand(part, variables) for part in container.get("args") or []]
    if not command:
        raise ResourceError([f"pod field {where}.command: required: there is no image whose entry point could run"])
    env = dict(machine.inherited) | {key: rewriter.path(value, scratch=True) for key, value in variables.items()}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    argv = [rewriter.path(command[0]), *rewriter.arguments([*command[1:], *arguments])]
    if (found := shutil.which(argv[0], path=env.get("PATH"))) is None:
        raise ResourceError([f"pod field {where}.command: there is no executable {argv[0]!r} on this machine"])
    argv[0] = found
    probes = [_probe(container[kind], numbers, f"{where}.{kind}") if kind in container else None for kind in PROBES]
    return LocalContainer(name, tuple(argv), env, *probes)


def _variables(
    container: Mapping[str, Any], volumes: PodVolumes, pod_metadata: Mapping[str, Any], where: str
) -> dict[str, str]:
    """The container's variables, each expanded with those before it, as the kubelet does."""
    fields = {
        "metadata.name": volumes.pod,
        "metadata.namespace": volumes.namespace,
        "status.podIP": "127.0.0.1",
        "status.hostIP": "127.0.0.1",
    }
    for part in ("labels", "annotations"):
        fields |= {f"metadata.{part}['{key}']": value for key, value in pod_metadata[part].items()}
    variables: dict[str, str] = {}
    for entry in container.get("env") or []:
        at = f"pod field {where}.env[{entry['name']}]"
        source = entry.get("valueFrom")
        if not source:
            variables[entry["name"]] = expand(entry.get("value", ""), variables)
        elif (path := source.get("fieldRef", {}).get("fieldPath")) in fields:
            variables[entry["name"]] = fields[path]
        elif "secretKeyRef" in source:
            value = volumes.secret_value(source["secretKeyRef"], at)
            if value is not None:
                variables[entry["name"]] = value
        else:
            raise ResourceError([f"{at}.valueFrom.{', '.join(source)}{UNMAPPED}"])
    return variables


def _probe(spec: Mapping[str, Any], ports: Mapping[Any, int], where: str) -> Probe:
    known = {
        "httpGet", "initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold", "successThreshold",
        "terminationGracePeriodSeconds",
    }  # fmt: skip
    unknown = sorted(set(spec) - known)
    get = spec.get("httpGet")
    if unknown or get is None or get.get("scheme", "HTTP") != "HTTP" or "host" in get:
        raise ResourceError([f"pod field {where}{'.' + unknown[0] if unknown else ''}{UNMAPPED}: httpGet over HTTP is"])
    if get["port"] not in ports:
        raise ResourceError([f"pod field {where}.httpGet.port: {get['port']!r} is no port of the container"])
    path = "/" + str(get.get("path", "/")).lstrip("/")
    return Probe(
        url=f"http://127.0.0.1:{ports[get['port']]}{path}",
        headers={header["name"]: header["value"] for header in get.get("httpHeaders") or []},
        initial_delay=spec.get("initialDelaySeconds", 0),
        period=spec.get("periodSeconds", 10),
        timeout=spec.get("timeoutSeconds", 1),
        failures=spec.get("failureThreshold", 3),
        successes=spec.get("successThreshold", 1),
    )


def _unmapped(pod: Mapping[str, Any]) -> Iterator[str]:
    for field in sorted(set(pod) - MAPPED_POD - CLUSTER_ONLY_POD):
        yield f"pod field spec.{field}{UNMAPPED}"
    for extra in pod["containers"][1:]:
        yield f"pod field spec.containers[{extra['name']}]{UNMAPPED}: one container per pod is"
    for part in ("initContainers", "containers"):
        for container in pod.get(part) or []:
            where = f"pod field spec.{part}[{container['name']}]"
            for field in sorted(set(container) - MAPPED_CONTAINER - CLUSTER_ONLY_CONTAINER):
                yield f"{where}.{field}{UNMAPPED}"
            hooks = container.get("lifecycle") or {}
            for hook, action in hooks.items():
                # The sleep waits for Services to forget the pod; the endpoints file forgets it before the signal.
                if hook != "preStop" or set(action) != {"sleep"}:
                    yield f"{where}.lifecycle.{hook}{UNMAPPED}"
