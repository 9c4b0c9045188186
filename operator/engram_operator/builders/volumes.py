"""Volumes of a pod: what each is for, where it is mounted, and which containers see it.

Credentials are whole volumes, never subPath mounts: only so does a rotated Secret arrive in a running pod.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engram_operator.builders import naming
from engram_operator.builders import settings as at
from engram_operator.resources.model import EngramModel
from engram_operator.resources.policy import SnapshotPolicy

SHM_SIZE = "8Gi"
TOKEN_SECONDS = 3600  # the kubelet renews it in time


@dataclass(frozen=True, slots=True)
class Volume:
    """One volume and its one mount. `source` None: a volume claim template of the StatefulSet provides it."""

    name: str
    path: str
    source: dict[str, Any] | None
    read_only: bool = False
    sub_path: str = ""
    in_init: bool = False
    in_engine: bool = True

    def mount(self) -> dict[str, Any]:
        mount: dict[str, Any] = {"name": self.name, "mountPath": self.path}
        if self.sub_path:
            mount["subPath"] = self.sub_path
        if self.read_only:
            mount["readOnly"] = True
        return mount


def volumes(model: EngramModel, policy: SnapshotPolicy | None, settings: at.BuildSettings) -> list[Volume]:
    """Every volume of the model's pods, in a fixed order."""
    found = [Volume("scratch", at.SCRATCH_PATH, {"emptyDir": {}}, in_init=True)]
    if (cache := cache_volume(model)) is not None:
        found.append(cache)
    if model.uri.scheme == "pvc":
        claim, path = model.uri.claim
        source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        found.append(Volume("model", at.MODEL_PATH, source, read_only=True, sub_path=path, in_init=True))
    if model.credentials_secret:
        found.append(_secret("model-credentials", at.MODEL_CREDENTIALS_PATH, model.credentials_secret, init_only=True))
    if model.api_keys_secret:
        found.append(_secret("api-keys", at.API_KEYS_PATH, model.api_keys_secret))
    if settings.operator_account is not None:
        found.append(cluster_identity())
    if model.snapshots.enabled:
        found += store_volumes(policy)
    if model.accelerator.count > 1:  # NCCL between the ranks; 64 MiB, the default, is too small
        found.append(Volume("shm", at.SHM_PATH, {"emptyDir": {"medium": "Memory", "sizeLimit": SHM_SIZE}}))
    return found


def cluster_identity() -> Volume:
    """The pod's own token, which may do nothing but what every account may: read the keys that tokens are signed with.

    A volume and not the mounted default, so that it is one file for one purpose and short-lived.
    """
    sources: list[dict[str, Any]] = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    ]
    source = {"projected": {"defaultMode": 0o440, "sources": sources}}
    return Volume("cluster", at.CLUSTER_PATH, source, read_only=True)


def cache_volume(model: EngramModel) -> Volume | None:
    """Weights, compiled kernels and the disk tier; None when the model has no cache."""
    match model.cache.type:
        case "None":
            return None
        case "EmptyDir":
            return Volume("cache", at.CACHE_PATH, {"emptyDir": {"sizeLimit": model.cache.size}}, in_init=True)
        case "PersistentVolumeClaim":
            claim = model.cache.claim_name
            source = {"persistentVolumeClaim": {"claimName": claim}} if claim else None
            return Volume("cache", at.CACHE_PATH, source, in_init=True)


def claim_templates(model: EngramModel) -> list[dict[str, Any]]:
    """The StatefulSet's volume claim templates: one cache per replica, unless a claim is named."""
    if model.cache.type != "PersistentVolumeClaim" or model.cache.claim_name:
        return []
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": model.cache.size}},
    }
    if model.cache.storage_class_name is not None:
        spec["storageClassName"] = model.cache.storage_class_name
    # The claims made from it take the label over, and only so does the operator see one that is not bound.
    return [{"metadata": {"name": "cache", "labels": {"app.kubernetes.io/managed-by": naming.MANAGER}}, "spec": spec}]


def pod_volumes(found: Iterable[Volume]) -> list[dict[str, Any]]:
    return [{"name": volume.name, **volume.source} for volume in found if volume.source is not None]


def store_volumes(policy: SnapshotPolicy | None) -> list[Volume]:
    """The tenant key, and what the policy's store needs: for whoever reads or writes snapshots."""
    secret, key = (policy.tenant_key if policy else None) or (at.TENANT_KEY_SECRET, at.TENANT_KEY_KEY)
    items = [{"key": key, "path": at.TENANT_KEY_KEY}]
    source: dict[str, Any] = {"secret": {"secretName": secret, "defaultMode": 0o440, "items": items}}
    found = [Volume("tenant-key", at.TENANT_KEY_PATH, source, read_only=True)]
    if policy is None:
        return found
    storage = policy.storage
    if storage.uri.scheme == "pvc":
        claim, path = storage.uri.claim
        source = {"persistentVolumeClaim": {"claimName": claim}}
        found.append(Volume("store", at.STORE_PATH, source, sub_path=path))
    if storage.credentials is not None:
        keys = storage.credentials
        required = [
            {"key": keys.access_key_id, "path": "access-key-id"},
            {"key": keys.secret_access_key, "path": "secret-access-key"},
        ]
        # The session token is in a source of its own: `optional` then excuses this key alone, not a missing Secret.
        token = [{"key": keys.session_token, "path": "session-token"}]
        source = {
            "projected": {
                "defaultMode": 0o440,
                "sources": [
                    {"secret": {"name": keys.secret, "items": required}},
                    {"secret": {"name": keys.secret, "items": token, "optional": True}},
                ],
            }
        }
        found.append(Volume("store-credentials", at.STORE_CREDENTIALS_PATH, source, read_only=True))
    if storage.ca_bundle is not None:
        name, key = storage.ca_bundle
        source = {"configMap": {"name": name, "defaultMode": 0o444, "items": [{"key": key, "path": "ca.crt"}]}}
        found.append(Volume("store-ca", at.STORE_CA_PATH, source, read_only=True))
    return found


def _secret(name: str, path: str, secret: str, *, init_only: bool = False) -> Volume:
    source: dict[str, Any] = {"secret": {"secretName": secret, "defaultMode": 0o440}}
    return Volume(name, path, source, read_only=True, in_init=init_only, in_engine=not init_only)
