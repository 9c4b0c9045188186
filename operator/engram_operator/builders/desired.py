"""desired(model, policy, settings): everything that should exist for a model, as plain dictionaries."""

from __future__ import annotations

from typing import Any

from engram_operator.builders import workload
from engram_operator.builders.settings import BuildSettings
from engram_operator.errors import ResourceError
from engram_operator.resources.model import EngramModel
from engram_operator.resources.policy import SnapshotPolicy


def desired(model: EngramModel, policy: SnapshotPolicy | None, settings: BuildSettings) -> list[dict[str, Any]]:
    """Kubernetes objects in the order to apply them. Pure and deterministic.

    `policy` is the one that the model names, or its namespace's default (resources.select_policy), or None: then
    snapshots stay in the replica's own tiers. ResourceError names the field that cannot be built.
    """
    if model.snapshots.enabled and policy is not None and policy.storage.uri.scheme == "file" and not settings.local:
        raise ResourceError(
            [f'SnapshotPolicy "{policy.name}": spec.storage.uri: file:// is for the local mode; use s3:// or pvc://']
        )
    objects = [] if model.service_account else [workload.service_account(model)]
    objects += workload.services(model)
    objects.append(workload.stateful_set(model, policy, settings))
    # A budget over a single replica would keep every node from being drained.
    if model.disruption.enabled and model.replicas > 1 and not model.suspend:
        objects.append(workload.disruption_budget(model))
    if model.monitoring.enabled:
        objects.append(workload.pod_monitor(model))
    if model.network_policy.enabled:
        objects.append(workload.network_policy(model, settings))
    return objects
