"""The activator of a namespace: it holds the requests of models that sleep until their pods are back.

One per namespace, made when a model first may sleep. It is owned by every such model, so it goes with the last of them
even where no operator runs any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engram_operator.builders import naming
from engram_operator.builders import settings as at
from engram_operator.builders.commands import admin_args
from engram_operator.builders.pod import NO_NETWORK, USER, container_security, node_lost_tolerations
from engram_operator.builders.volumes import Volume, cluster_identity, pod_volumes

# How long a held request may wait at most, and so how long the pod may take to end.
GRACE_SECONDS = 60


def activator(namespace: str, owners: Iterable[tuple[str, str]], settings: at.BuildSettings) -> list[dict[str, Any]]:
    """Service account and Deployment, in the order to apply them. `owners`: (name, uid) of who may sleep."""
    labels = {
        **naming.activator_selector(),
        "app.kubernetes.io/component": "activator",
        "app.kubernetes.io/managed-by": naming.MANAGER,
        "app.kubernetes.io/part-of": "engram",
    }
    metadata: dict[str, Any] = {
        "name": naming.ACTIVATOR,
        "namespace": namespace,
        "labels": labels,
        "ownerReferences": [
            {"apiVersion": "engram.dev/v1alpha1", "kind": "EngramModel", "name": name, "uid": uid}
            for name, uid in sorted(owners)
        ],
    }
    volumes = [Volume("scratch", at.SCRATCH_PATH, {"emptyDir": {}})]
    if settings.operator_account is not None:
        volumes.append(cluster_identity())
    template = {"metadata": {"labels": dict(labels)}, "spec": _pod(volumes, settings)}
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {**metadata},
        "automountServiceAccountToken": False,
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**metadata},
        "spec": {
            "replicas": 1,
            # A new one is ready before the old one goes: there is always one that can hold a request.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": naming.activator_selector()},
            "template": template,
        },
    }
    return [account, deployment]


def _pod(volumes: list[Volume], settings: at.BuildSettings) -> dict[str, Any]:
    def probe(path: str) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": "admin", "scheme": "HTTP"}, "periodSeconds": 2, "timeoutSeconds": 5}

    env = {**NO_NETWORK, "HOME": at.SCRATCH_PATH, "TMPDIR": at.SCRATCH_PATH}
    container = {
        "name": "activator",
        "image": settings.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["engram"],
        "args": [
            *("activator", "--host", "0.0.0.0", "--port", str(at.HTTP_PORT), "--admin-port", str(at.ADMIN_PORT)),
            *admin_args(settings),
        ],
        "env": [
            {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            *({"name": name, "value": env[name]} for name in sorted(env)),
        ],
        "ports": [
            {"name": "http", "containerPort": at.HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": at.ADMIN_PORT, "protocol": "TCP"},
        ],
        "readinessProbe": probe("/health/ready"),
        "livenessProbe": {**probe("/health/live"), "periodSeconds": 10, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "volumeMounts": [volume.mount() for volume in volumes],
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: dict[str, Any] = {
        "serviceAccountName": naming.ACTIVATOR,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "tolerations": node_lost_tolerations(),
        "volumes": pod_volumes(volumes),
    }
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return spec
