"""The key that scopes and signs a namespace's snapshots: made once, never read, never owned.

Made by `create` alone, so an account that may not read Secrets can do it, and an existing key can never be replaced.
It has no owner: it outlives every model, because without it the snapshots in the bucket are noise.
"""

from __future__ import annotations

import base64
import secrets

from engram_operator.builders.settings import TENANT_KEY_KEY, TENANT_KEY_SECRET
from engram_operator.kube.client import Kube
from engram_operator.resources import EngramModel, SnapshotPolicy

KEY_BYTES = 32


def needs_namespace_key(model: EngramModel, policy: SnapshotPolicy | None) -> bool:
    """False when snapshots are off, or the policy names a key of its own."""
    return model.snapshots.enabled and (policy is None or policy.tenant_key is None)


async def ensure_tenant_key(kube: Kube, namespace: str) -> bool:
    """True when the key was made now. Called when a pod template is about to change, not on every look: a key that
    was lost is a person's to restore, since a new one would make every stored snapshot unreadable."""
    key = base64.b64encode(secrets.token_bytes(KEY_BYTES))  # printable, so `kubectl get -o yaml` backs it up whole
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": TENANT_KEY_SECRET,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/part-of": "engram"},
            "annotations": {"engram.dev/note": "Signs and scopes the snapshots of this namespace. Back it up."},
        },
        "type": "Opaque",
        "immutable": True,
        "data": {TENANT_KEY_KEY: base64.b64encode(key).decode()},
    }
    return await kube.create(secret) is not None
