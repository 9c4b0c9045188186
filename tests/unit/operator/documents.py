"""Documents and typed resources for the operator's tests."""

from __future__ import annotations

from typing import Any

from engram_operator.resources import EngramModel, Schemas, SnapshotPolicy

SCHEMAS = Schemas.load()


def document(kind: str, spec: dict[str, Any], name: str = "m", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "engram.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }


def model(uri: str = "hf://ibm-granite/granite-4.0-h-tiny", name: str = "granite", **spec: Any) -> EngramModel:
    """A model with these fields of its spec; `model` is merged with the URI."""
    source = {"uri": uri, **spec.pop("model", {})}
    return EngramModel.parse(SCHEMAS.admit(document("EngramModel", {"model": source, **spec}, name)))


def policy(uri: str = "pvc://memory", name: str = "default", **spec: Any) -> SnapshotPolicy:
    """A policy with these fields of its spec; `storage` is merged with the URI."""
    storage = {"uri": uri, **spec.pop("storage", {})}
    return SnapshotPolicy.parse(SCHEMAS.admit(document("SnapshotPolicy", {"storage": storage, **spec}, name)))
