"""The pod of a model: an init container that brings or checks the weights, and the engine.

Everything is set for the `restricted` Pod Security Standard: no root, no privileges, a read-only root, no API token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engram_operator.builders import naming, volumes
from engram_operator.builders import settings as at
from engram_operator.builders.commands import fetch_args, serve_args
from engram_operator.errors import ResourceError
from engram_operator.resources.model import EngramModel
from engram_operator.resources.policy import SnapshotPolicy
from engram_operator.resources.quantity import format_bytes, parse_quantity

# Without a group of its own a process has group 0.
USER = 10001
GRACE_SECONDS = 30  # on top of the drain timeout: the preStop sleep, and the flush after the last turn
PRE_STOP_SECONDS = 5  # until every kube-proxy has taken the pod out of its Services
NODE_LOST_SECONDS = 30
PROBE_TIMEOUT_SECONDS = 5
STARTUP_PERIOD_SECONDS = 2
NO_NETWORK = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TRANSFORMERS_OFFLINE": "1",
}


def container_security() -> dict[str, Any]:
    """What every container of ours runs with, and what podTemplate's containers get where they say nothing."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def node_lost_tolerations() -> list[dict[str, Any]]:
    """How long a pod stays on a node that went away; Kubernetes' own five minutes are an outage."""
    return [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": NODE_LOST_SECONDS,
        }
        for state in ("not-ready", "unreachable")
    ]


def pod_template(model: EngramModel, policy: SnapshotPolicy | None, settings: at.BuildSettings) -> dict[str, Any]:
    """metadata and spec of the pods, before podTemplate is applied."""
    found = volumes.volumes(model, policy, settings)
    spec: dict[str, Any] = {
        "serviceAccountName": naming.service_account(model),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": model.drain_timeout_seconds + GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            # A cache of 60 GB would otherwise be chowned at every start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_model_container(model, settings, found)],
        "containers": [_engine_container(model, policy, settings, found)],
        "volumes": volumes.pod_volumes(found),
        **_scheduling(model),
    }
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    annotations = {
        naming.SERVED_NAME_ANNOTATION: model.served_name,
        "kubectl.kubernetes.io/default-container": at.ENGINE,
    }
    return {"metadata": {"labels": naming.labels(model), "annotations": annotations}, "spec": spec}


def _model_container(model: EngramModel, settings: at.BuildSettings, found: list[volumes.Volume]) -> dict[str, Any]:
    if model.uri.scheme in ("hf", "s3") and model.cache.type == "None":
        raise ResourceError([f"spec.cache.type: None leaves no place for weights from {model.uri.scheme}://"])
    download = model.uri.scheme in ("hf", "s3")
    offline = {k: v for k, v in NO_NETWORK.items() if not (download and k.endswith("_OFFLINE"))}
    return {
        "name": at.MODEL_INIT,
        "image": model.engine.image or settings.image,
        "imagePullPolicy": model.engine.image_pull_policy,
        "command": ["engram"],
        "args": fetch_args(model),
        "env": _env({**offline, **_folders(model)}),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "volumeMounts": [volume.mount() for volume in found if volume.in_init],
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _engine_container(
    model: EngramModel, policy: SnapshotPolicy | None, settings: at.BuildSettings, found: list[volumes.Volume]
) -> dict[str, Any]:
    own = {env["name"] for env in model.engine.env}
    pod = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (("POD_NAME", "metadata.name"), ("POD_NAMESPACE", "metadata.namespace"))
    ]
    if taken := sorted(own & {"POD_NAME", "POD_NAMESPACE"}):
        raise ResourceError([f"spec.engine.env: {', '.join(taken)} is set by the operator"])
    defaults = {k: v for k, v in {**NO_NETWORK, **_folders(model)}.items() if k not in own}
    return {
        "name": at.ENGINE,
        "image": model.engine.image or settings.image,
        "imagePullPolicy": model.engine.image_pull_policy,
        "command": ["engram"],
        "args": serve_args(model, policy, settings),
        "env": [*pod, *_env(defaults), *map(dict, model.engine.env)],
        "ports": [
            {"name": "http", "containerPort": at.HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": at.ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(model),
        "volumeMounts": [volume.mount() for volume in found if volume.in_engine],
        **_probes(model.engine.startup_timeout_seconds),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _probes(startup_seconds: int) -> dict[str, Any]:
    def probe(path: str, period: int, failures: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
            "periodSeconds": period,
            "timeoutSeconds": PROBE_TIMEOUT_SECONDS,
            "failureThreshold": failures,
            "successThreshold": 1,
        }

    return {
        # No initial delay anywhere: the startup probe alone decides how long loading may take.
        "startupProbe": probe("/health/startup", STARTUP_PERIOD_SECONDS, -(-startup_seconds // STARTUP_PERIOD_SECONDS)),
        "readinessProbe": probe("/health/ready", 2, 2),
        "livenessProbe": probe("/health/live", 10, 6),
    }


def _folders(model: EngramModel) -> dict[str, str]:
    """The only places that can be written: the root is read-only."""
    kept = at.CACHE_PATH if model.cache.type != "None" else at.SCRATCH_PATH
    return {
        "HOME": at.SCRATCH_PATH,
        "TMPDIR": at.SCRATCH_PATH,
        "TRITON_CACHE_DIR": f"{kept}/triton",
        "XDG_CACHE_HOME": kept,
    }


def _env(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": values[name]} for name in sorted(values)]


def _resources(model: EngramModel) -> dict[str, Any]:
    """The user's resources, the GPUs filled in, the host tier added to the memory."""
    requests: dict[str, int | str] = dict(model.requests)
    limits: dict[str, int | str] = dict(model.limits)
    name, count = model.accelerator.resource_name, model.accelerator.count
    if name:
        asked = limits.get(name, requests.get(name, count))
        if parse_quantity(asked) < count:
            raise ResourceError([f"spec.resources.limits.{name}: must be >= parallelism.tensor ({count}), got {asked}"])
        # Kubernetes takes an extended resource only with request and limit equal.
        requests[name] = limits[name] = asked
    elif count > 1:
        raise ResourceError([f"spec.parallelism.tensor: {count} needs an accelerator.resourceName"])
    host = parse_quantity(model.snapshots.host_memory) if model.snapshots.enabled else 0
    if host:
        base = requests.get("memory", limits.get("memory", 0))
        requests["memory"] = format_bytes(parse_quantity(base) + host)
        if "memory" in limits:
            limits["memory"] = format_bytes(parse_quantity(limits["memory"]) + host)
    return {part: dict(sorted(v.items())) for part, v in (("requests", requests), ("limits", limits)) if v}


def _scheduling(model: EngramModel) -> dict[str, Any]:
    wanted, name = model.scheduling, model.accelerator.resource_name
    tolerations = node_lost_tolerations()
    if name:
        tolerations.append({"key": name, "operator": "Exists", "effect": "NoSchedule"})
    tolerations += map(dict, wanted.tolerations)
    nodes = dict(wanted.node_selector)
    if model.accelerator.product:
        nodes["nvidia.com/gpu.product"] = model.accelerator.product
    # Not only above one replica: a pod template that depends on the replica count would restart pods when scaled.
    spread = [dict(entry) for entry in wanted.topology_spread_constraints] or [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": naming.selector(model)},
        }
    ]
    spec: dict[str, Any] = {"tolerations": tolerations, "topologySpreadConstraints": spread}
    optional = {
        "nodeSelector": nodes,
        "affinity": wanted.affinity,
        "priorityClassName": wanted.priority_class_name,
        "runtimeClassName": wanted.runtime_class_name,
        "schedulerName": wanted.scheduler_name,
    }
    return spec | {field: value for field, value in optional.items() if value}
