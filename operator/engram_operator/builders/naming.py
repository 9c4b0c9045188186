"""Names, labels and annotations of everything that belongs to a model.

The selector uses the resource's name, never the served name: a selector is immutable, a served name is not.
"""

from __future__ import annotations

import hashlib
from typing import Any

from engram_operator.resources.model import EngramModel

MANAGER = "engram-operator"
APP = "engram-engine"
MODEL_LABEL = "engram.dev/model"
SERVED_NAME_ANNOTATION = "engram.dev/served-model-name"
RENDERER_ANNOTATION = "engram.dev/renderer"
ACTIVATOR = "engram-activator"


def model_hash(served_name: str) -> str:
    """Label value that stands for a served name, which may be longer than a label and hold any character.

    First 16 hex digits of its SHA-256. Clients compute the same to find a model's endpoints without reading resources.
    """
    return hashlib.sha256(served_name.encode()).hexdigest()[:16]


def pods_service(model: EngramModel) -> str:
    """Name of the headless Service that gives the pods their stable names."""
    return f"{model.name}-pods"


def service_account(model: EngramModel) -> str:
    return model.service_account or f"{model.name}-engine"


def selector(model: EngramModel) -> dict[str, str]:
    """Labels that select a model's pods."""
    return {"app.kubernetes.io/name": APP, "app.kubernetes.io/instance": model.name}


def activator_selector() -> dict[str, str]:
    """Labels that select a namespace's activator: what a sleeping model's Service points at."""
    return {"app.kubernetes.io/name": ACTIVATOR}


def labels(model: EngramModel, component: str = "engine") -> dict[str, str]:
    return {
        **selector(model),
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": MANAGER,
        "app.kubernetes.io/part-of": "engram",
        MODEL_LABEL: model_hash(model.served_name),
    }


def metadata(model: EngramModel, name: str, *, component: str = "engine", **annotations: str) -> dict[str, Any]:
    """Object metadata with labels, the served name, and the owner when the model came from an API server."""
    meta: dict[str, Any] = {
        "name": name,
        "namespace": model.namespace,
        "labels": labels(model, component),
        "annotations": {SERVED_NAME_ANNOTATION: model.served_name, **annotations},
    }
    if model.uid is not None:
        meta["ownerReferences"] = [
            {
                "apiVersion": "engram.dev/v1alpha1",
                "kind": "EngramModel",
                "name": model.name,
                "uid": model.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return meta
