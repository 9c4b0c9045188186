"""The objects around the pods: StatefulSet, Services, disruption budget, and what monitoring and networks ask for.

A StatefulSet and not a Deployment: pods are replaced in place, so a rolling update never waits for a spare GPU, and the
stable names are what clients hash conversations over.
"""

from __future__ import annotations

from typing import Any

from engram_operator.builders import naming
from engram_operator.builders import settings as at
from engram_operator.builders.overlay import apply_overlay
from engram_operator.builders.pod import pod_template
from engram_operator.builders.volumes import claim_templates
from engram_operator.resources.model import EngramModel
from engram_operator.resources.policy import SnapshotPolicy

PODS_COMPONENT = "engine-pods"  # tells the headless Service from the other one


def service_account(model: EngramModel) -> dict[str, Any]:
    """An account with no rights: a pod has an identity of its own, and no token for it."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": naming.metadata(model, naming.service_account(model)),
        "automountServiceAccountToken": False,
    }


def services(model: EngramModel) -> list[dict[str, Any]]:
    """Headless for clients that choose a replica, ClusterIP for those that do not. Neither has the admin port."""
    port = {"name": "http", "port": at.HTTP_PORT, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": naming.metadata(model, naming.pods_service(model), component=PODS_COMPONENT),
            "spec": {
                "type": "ClusterIP",
                "clusterIP": "None",
                "publishNotReadyAddresses": False,
                "selector": naming.selector(model),
                "ports": [dict(port)],
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": naming.metadata(model, model.name),
            "spec": {"type": "ClusterIP", "selector": naming.selector(model), "ports": [dict(port)]},
        },
    ]


def stateful_set(model: EngramModel, policy: SnapshotPolicy | None, settings: at.BuildSettings) -> dict[str, Any]:
    template = apply_overlay(pod_template(model, policy, settings), model.pod_template)
    spec: dict[str, Any] = {
        "replicas": 0 if model.suspend else model.replicas,
        "serviceName": naming.pods_service(model),
        # In order, one pod that never becomes ready would keep its own repair from being rolled out.
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": naming.selector(model)},
        "template": template,
    }
    if claims := claim_templates(model):
        spec["volumeClaimTemplates"] = claims
        kept = "Retain" if model.cache.retain else "Delete"
        spec["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": kept, "whenScaled": kept}
    metadata = naming.metadata(model, model.name, **{naming.RENDERER_ANNOTATION: at.RENDERER})
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def disruption_budget(model: EngramModel) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": naming.metadata(model, model.name),
        "spec": {
            "maxUnavailable": model.disruption.max_unavailable,
            # A pod that is broken anyway must not keep a node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": naming.selector(model)},
        },
    }


def pod_monitor(model: EngramModel) -> dict[str, Any]:
    """Metrics for the Prometheus operator. Of pods, not of a Service: they are on the admin port, which none has."""
    metadata = naming.metadata(model, model.name)
    metadata["labels"] = {**model.monitoring.labels, **metadata["labels"]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": naming.selector(model)},
            "podMetricsEndpoints": [{"port": "admin", "path": "/metrics", "interval": model.monitoring.interval}],
        },
    }


def network_policy(model: EngramModel, settings: at.BuildSettings) -> dict[str, Any]:
    """Requests from the sources named, else from the namespace; the admin port from the operator.

    Who is named may also read metrics where they are wanted; the rest of the admin port asks for an admin's token.
    """
    sources: list[dict[str, Any]] = [dict(entry) for entry in model.network_policy.sources] or [{"podSelector": {}}]
    if model.idle_seconds is not None:  # it hands over what it held
        sources.append({"podSelector": {"matchLabels": naming.activator_selector()}})
    wanted = ("http", "admin") if model.monitoring.enabled else ("http",)
    operator = {"kubernetes.io/metadata.name": settings.operator_namespace}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": naming.metadata(model, model.name),
        "spec": {
            "podSelector": {"matchLabels": naming.selector(model)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": sources, "ports": [{"port": port, "protocol": "TCP"} for port in wanted]},
                {
                    "from": [{"namespaceSelector": {"matchLabels": operator}}],
                    "ports": [{"port": port, "protocol": "TCP"} for port in ("http", "admin")],
                },
            ],
        },
    }
