"""What the operator has made of a model, in a form that two runs can be compared in."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.cluster.client import Client, Object

MANAGED = "app.kubernetes.io/managed-by=engram-operator"
PATHS = {
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
}
OF_THE_RUN = frozenset({"clusterIP", "clusterIPs"})
SERVED = "engram.dev/model"  # a hash of the served name
# Hashes over names and times.
HASHES = frozenset({"engram.dev/applied", "engram.dev/rendered"})


def children(kube: Client, namespace: str, model: str) -> dict[str, Any]:
    """By kind and name: labels, annotations, owners, spec. The model's own name and what the run chose are masked."""
    found = {}
    for kind, path in PATHS.items():
        for item in kube.objects(f"{path.format(namespace)}?labelSelector={MANAGED.replace('=', '%3D')}"):
            owners = item["metadata"].get("ownerReferences", [])
            if any(owner["name"] == model for owner in owners):
                found[f"{kind} {item['metadata']['name']}"] = _shape(item)
    return _masked(found, model, *((item["labels"] or {}).get(SERVED, "MODEL") for item in found.values()))


def status(kube: Client, namespace: str, model: str) -> dict[str, Any]:
    """A model's status without times and names of revisions, which are hashes."""
    live = kube.custom("engrammodels", namespace, model) or {}
    found = {key: value for key, value in (live.get("status") or {}).items() if not key.endswith(("Time", "Revision"))}
    found["conditions"] = [
        {key: value for key, value in entry.items() if key != "lastTransitionTime"}
        for entry in found.get("conditions", [])
    ]
    found["finalizers"] = live.get("metadata", {}).get("finalizers")
    return _masked(found, model)


def _masked(found: dict[str, Any], *words: str) -> dict[str, Any]:
    text = json.dumps(found)
    for word in words:
        text = text.replace(word, "MODEL")
    return dict(json.loads(text))


def _shape(item: Object) -> Object:
    metadata = item["metadata"]
    annotations = metadata.get("annotations", {})
    return {
        "labels": metadata.get("labels"),
        "annotations": {key: value for key, value in annotations.items() if key not in HASHES},
        "hashes": sorted(HASHES & annotations.keys()),
        "owners": [{**owner, "uid": ""} for owner in metadata.get("ownerReferences", [])],
        "spec": {key: value for key, value in item.get("spec", {}).items() if key not in OF_THE_RUN},
    }
