"""Our custom resources as the tests write them: small models on CPU, and a policy over the tests' object store."""

from __future__ import annotations

from typing import Any

from tests.e2e.cluster.client import Object
from tests.e2e.conftest import ObjectStore

API_VERSION = "engram.dev/v1alpha1"
ENGINE = {
    "dtype": "float32",
    "maxModelLen": 512,
    "maxConcurrency": 4,
    "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
}


def model(name: str, uri: str, **spec: Any) -> Object:
    """An EngramModel on CPU; a field of `spec` replaces the one here."""
    body = {
        "model": {"uri": uri},
        "accelerator": {"resourceName": ""},
        "engine": ENGINE,
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
        "cache": {"type": "EmptyDir", "size": "1Gi"},
        "snapshots": {"hostMemory": "64Mi", "disk": "256Mi"},
        "updateStrategy": {"drainTimeoutSeconds": 10},
    }
    return {"apiVersion": API_VERSION, "kind": "EngramModel", "metadata": {"name": name}, "spec": {**body, **spec}}


def policy(store: ObjectStore, bucket: str, **spec: Any) -> Object:
    """The SnapshotPolicy `default`: every turn is kept in the bucket."""
    body = {"storage": store.storage(bucket), "triggers": {"turnEnd": True}, **spec}
    return {"apiVersion": API_VERSION, "kind": "SnapshotPolicy", "metadata": {"name": "default"}, "spec": body}


def snapshot(name: str, model_name: str, conversation: str, **spec: Any) -> Object:
    """A Snapshot to be taken now of a conversation's newest turn."""
    body = {"modelRef": {"name": model_name}, "source": {"conversation": {"id": conversation}}, **spec}
    return {"apiVersion": API_VERSION, "kind": "Snapshot", "metadata": {"name": name}, "spec": body}
