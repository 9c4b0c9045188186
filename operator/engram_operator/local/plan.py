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

from engram_operator.builders.settings import SHM_PATH
from engram_operator.errors import ResourceError
from engram_operator.local.rewrite import Rewriter, expand
from engram_operator.local.secrets import LocalSecrets, variable_prefix

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
    volumes = _Volumes(metadata["namespace"], name, machine)
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


class _Volumes:
    """The pod's volumes as folders; collects what must be made before the pod starts."""

    def __init__(self, namespace: str, pod: str, machine: Machine) -> None:
        self.namespace, self.pod = namespace, pod
        self.folder = machine.state_dir / "pods" / namespace / pod
        self.problems: list[str] = []
        self.clear: list[Path] = [self.folder / "volumes"]
        self.keep: list[Path] = []
        self.files: dict[Path, bytes] = {}
        self._claims = machine.state_dir / "volumes" / namespace
        self._secrets = machine.secrets
        self._folders: dict[str, Path | None] = {}  # None: stays what it is on this machine

    def keep_claim(self, volume: str, claim: str) -> None:
        self._folders[volume] = self._claims / claim
        self.keep.append(self._claims / claim)

    def add(self, volume: Mapping[str, Any]) -> None:
        name = volume["name"]
        folder = self.folder / "volumes" / name
        match [kind for kind in volume if kind != "name"]:
            case ["emptyDir"]:
                self._folders[name] = folder
                self.clear.append(folder)
            case ["persistentVolumeClaim"]:
                self.keep_claim(name, volume["persistentVolumeClaim"]["claimName"])
            case ["secret"]:
                self._folders[name] = folder
                source = volume["secret"]
                self._add_secret(folder, source["secretName"], source)
            case ["projected"]:
                self._folders[name] = folder
                for index, source in enumerate(volume["projected"].get("sources") or []):
                    if set(source) == {"secret"}:
                        self._add_secret(folder, source["secret"]["name"], source["secret"])
                    else:
                        kind = ", ".join(source)
                        self.problems.append(f"pod field spec.volumes[{name}].projected.sources[{index}].{kind}{_NO}")
            case kinds:
                self.problems.append(f"pod field spec.volumes[{name}].{', '.join(kinds)}{_NO}")

    def mount(self, container: str, mount: Mapping[str, Any]) -> Path | None:
        """The folder behind a mount; None for one that stays this machine's own."""
        if mount["mountPath"] == SHM_PATH:
            return None
        for field in mount:
            if field not in ("name", "mountPath", "readOnly", "subPath"):
                self.problems.append(f"pod field spec.containers[{container}].volumeMounts.{field}{_NO}")
        folder = self._folders.get(mount["name"])
        if folder is None:
            if mount["name"] not in self._folders:
                self.problems.append(f"pod field spec.containers[{container}].volumeMounts: no volume {mount['name']}")
            return None
        if sub_path := mount.get("subPath"):
            folder = folder / sub_path
            self.keep.append(folder)
        return folder

    def secret_value(self, reference: Mapping[str, Any], where: str) -> str | None:
        """A variable from a Secret; None when it is optional and not given."""
        data = self._secrets.read(reference["name"])
        if reference["key"] in data:
            return data[reference["key"]].decode()
        if not reference.get("optional"):
            self.problems.append(f"{where}: {_missing_secret(reference['name'], reference['key'])}")
        return None

    def _add_secret(self, folder: Path, secret: str, source: Mapping[str, Any]) -> None:
        data = self._secrets.read(secret)
        optional = source.get("optional", False)
        items = source.get("items")
        wanted = {item["key"]: item["path"] for item in items} if items else {key: key for key in data}
        self.keep.append(folder)
        if not data and not optional:
            self.problems.append(_missing_secret(secret, *wanted))
            return
        for key, path in wanted.items():
            if key in data:
                self.files[folder / path] = data[key]
            elif not optional:
                self.problems.append(_missing_secret(secret, key))


_NO = " cannot be mapped to a local process"


def _missing_secret(secret: str, *keys: str) -> str:
    lines = ", ".join(f"{variable_prefix(secret)}__{key}=..." for key in keys or ("KEY",))
    return f'Secret "{secret}" is missing: write {lines} to a file and give it as --env-file'


def _container(
    container: Mapping[str, Any],
    volumes: _Volumes,
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
            raise ResourceError([f"pod field {where}.ports[{port.get('name', port['containerPort'])}]{_NO}"])
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
    container: Mapping[str, Any], volumes: _Volumes, pod_metadata: Mapping[str, Any], where: str
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
            raise ResourceError([f"{at}.valueFrom.{', '.join(source)}{_NO}"])
    return variables


def _probe(spec: Mapping[str, Any], ports: Mapping[Any, int], where: str) -> Probe:
    known = {
        "httpGet", "initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold", "successThreshold",
        "terminationGracePeriodSeconds",
    }  # fmt: skip
    unknown = sorted(set(spec) - known)
    get = spec.get("httpGet")
    if unknown or get is None or get.get("scheme", "HTTP") != "HTTP" or "host" in get:
        raise ResourceError([f"pod field {where}{'.' + unknown[0] if unknown else ''}{_NO}: httpGet over HTTP is"])
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
        yield f"pod field spec.{field}{_NO}"
    for extra in pod["containers"][1:]:
        yield f"pod field spec.containers[{extra['name']}]{_NO}: one container per pod is"
    for part in ("initContainers", "containers"):
        for container in pod.get(part) or []:
            where = f"pod field spec.{part}[{container['name']}]"
            for field in sorted(set(container) - MAPPED_CONTAINER - CLUSTER_ONLY_CONTAINER):
                yield f"{where}.{field}{_NO}"
            hooks = container.get("lifecycle") or {}
            for hook, action in hooks.items():
                # The sleep waits for Services to forget the pod; the endpoints file forgets it before the signal.
                if hook != "preStop" or set(action) != {"sleep"}:
                    yield f"{where}.lifecycle.{hook}{_NO}"
