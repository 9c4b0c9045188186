"""The kinds of objects that the operator reads or writes.

A table and not discovery: the operator's rights name each kind anyway, so it can meet no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource of the API. `api_version` as in a manifest: "v1", "apps/v1"."""

    api_version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group as roles name it: "" for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path. Without a namespace, that of the whole cluster. ValueError when a name has no namespace."""
        if name is not None and self.namespaced and not namespace:
            raise ValueError(f"namespace is required for {self.kind} {name}")
        root = "apis" if "/" in self.api_version else "api"
        parts = ["", root, self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [self.plural, *(part for part in (name, subresource) if part)]
        return "/".join(parts)


MODELS = Kind("engram.dev/v1alpha1", "engrammodels", "EngramModel")
POLICIES = Kind("engram.dev/v1alpha1", "snapshotpolicies", "SnapshotPolicy")
SNAPSHOTS = Kind("engram.dev/v1alpha1", "snapshots", "Snapshot")
STATEFULSETS = Kind("apps/v1", "statefulsets", "StatefulSet")
DEPLOYMENTS = Kind("apps/v1", "deployments", "Deployment")
PODS = Kind("v1", "pods", "Pod")
SERVICES = Kind("v1", "services", "Service")
SERVICE_ACCOUNTS = Kind("v1", "serviceaccounts", "ServiceAccount")
SECRETS = Kind("v1", "secrets", "Secret")
PVCS = Kind("v1", "persistentvolumeclaims", "PersistentVolumeClaim")
NAMESPACES = Kind("v1", "namespaces", "Namespace", namespaced=False)
JOBS = Kind("batch/v1", "jobs", "Job")
DISRUPTION_BUDGETS = Kind("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES = Kind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy")
ENDPOINT_SLICES = Kind("discovery.k8s.io/v1", "endpointslices", "EndpointSlice")
POD_MONITORS = Kind("monitoring.coreos.com/v1", "podmonitors", "PodMonitor")
EVENTS = Kind("events.k8s.io/v1", "events", "Event")
LEASES = Kind("coordination.k8s.io/v1", "leases", "Lease")

ALL = (
    MODELS,
    POLICIES,
    SNAPSHOTS,
    STATEFULSETS,
    DEPLOYMENTS,
    PODS,
    SERVICES,
    SERVICE_ACCOUNTS,
    SECRETS,
    PVCS,
    NAMESPACES,
    JOBS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    ENDPOINT_SLICES,
    POD_MONITORS,
    EVENTS,
    LEASES,
)
_BY_MANIFEST = {(kind.api_version, kind.kind): kind for kind in ALL}


def kind_of(obj: Mapping[str, Any]) -> Kind:
    """The kind of a manifest. ValueError names the apiVersion and kind that are not in the table."""
    key = (str(obj.get("apiVersion")), str(obj.get("kind")))
    try:
        return _BY_MANIFEST[key]
    except KeyError:
        raise ValueError(f"kind: {key[0]} {key[1]} is none that the operator handles") from None
