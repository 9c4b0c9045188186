"""Where a model's snapshots are: its policy as a typed value, and the pods that can be asked.

Parsed once per version of the policy: thousands of Snapshots share a few policies.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from engram_operator.engines import EnginePod, engine_pods
from engram_operator.errors import ResourceError
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Object
from engram_operator.kube.kinds import MODELS, PODS, POLICIES, STATEFULSETS
from engram_operator.resources import Schemas, SnapshotPolicy
from engram_operator.resources.documents import DEFAULT_POLICY

_PARSED_LIMIT = 1024
_ROOT = re.compile(r"(?P<root>.*?)/v1/[0-9a-f]{32}/[^/]+/snap/")


def policy_name(model: Mapping[str, Any]) -> str | None:
    """The policy that a model's object means; None when it keeps no snapshots."""
    snapshots = (model.get("spec") or {}).get("snapshots") or {}
    if not snapshots.get("enabled", True):
        return None
    return (snapshots.get("policyRef") or {}).get("name") or DEFAULT_POLICY


class Stores:
    def __init__(self, cache: Cache, schemas: Schemas) -> None:
        self._cache = cache
        self._schemas = schemas
        self._parsed: OrderedDict[tuple[str, str], tuple[str, SnapshotPolicy | ResourceError]] = OrderedDict()

    def policy(self, namespace: str, name: str) -> SnapshotPolicy | None:
        """None when there is none of this name, or none that can be read: its own status says why."""
        try:
            return self.read_policy(namespace, name)
        except ResourceError:
            return None

    def read_policy(self, namespace: str, name: str) -> SnapshotPolicy | None:
        """As `policy`; ResourceError for one that cannot be honoured."""
        obj = self._cache.get(POLICIES, namespace, name)
        if obj is None:
            return None
        key, version = (namespace, name), f"{obj['metadata'].get('uid')}/{obj['metadata'].get('generation')}"
        known = self._parsed.get(key)
        if known is None or known[0] != version:
            known = self._parsed[key] = (version, self._parse(obj))
            while len(self._parsed) > _PARSED_LIMIT:
                self._parsed.popitem(last=False)
        if isinstance(known[1], ResourceError):
            raise known[1]
        return known[1]

    def of_model(self, namespace: str, model: str) -> SnapshotPolicy | None:
        obj = self._cache.get(MODELS, namespace, model)
        name = policy_name(obj) if obj is not None else None
        return self.policy(namespace, name) if name is not None else None

    def of_snapshot(self, obj: Object) -> SnapshotPolicy | None:
        """The policy that it names, else its model's."""
        namespace, spec = obj["metadata"]["namespace"], obj["spec"]
        named = (spec.get("policyRef") or {}).get("name")
        return self.policy(namespace, named) if named else self.of_model(namespace, spec["modelRef"]["name"])

    def rebuilt(self, obj: Object) -> SnapshotPolicy | None:
        """A policy for the store that a Snapshot's status remembers, when its own is gone; None if that says too
        little. Names of keys in the Secret are taken to be the usual ones."""
        status = obj.get("status") or {}
        found, storage = _ROOT.match(status.get("uri") or ""), status.get("storage") or {}
        if found is None or not found["root"].startswith("s3://"):
            return None
        spec: dict[str, Any] = {"uri": found["root"], "insecure": True, "useWorkloadIdentity": True}
        spec |= {name: storage[name] for name in ("endpointURL", "region", "forcePathStyle") if name in storage}
        if secret := storage.get("credentialsSecretName"):
            spec |= {"credentialsSecretRef": {"name": secret}, "useWorkloadIdentity": False}
        metadata = {"name": "gone", "namespace": obj["metadata"]["namespace"]}
        document = {
            "apiVersion": "engram.dev/v1alpha1",
            "kind": "SnapshotPolicy",
            "metadata": metadata,
            "spec": {"storage": spec},
        }
        parsed = self._parse(document)
        return parsed if isinstance(parsed, SnapshotPolicy) else None

    def pods(self, namespace: str, model: str) -> list[EnginePod]:
        """Those of the model's own StatefulSet, ready ones first: a label can be anybody's, an owner cannot."""
        stateful_set = self._cache.get(STATEFULSETS, namespace, model)
        if stateful_set is None:
            return []
        return engine_pods(self._cache.owned(PODS, namespace, stateful_set["metadata"]["uid"]))

    def _parse(self, obj: Mapping[str, Any]) -> SnapshotPolicy | ResourceError:
        try:
            parsed = SnapshotPolicy.parse(self._schemas.defaulted(obj))
        except ResourceError as error:
            return error
        except (KeyError, TypeError, AttributeError) as error:
            return ResourceError([f"spec: not of the shape this operator knows: {type(error).__name__} {error}"])
        if parsed.storage.uri.scheme == "file":
            return ResourceError(
                [
                    f"spec.storage.uri: {parsed.storage.uri.text} is for the local mode: a pod has no disk that"
                    " outlives it; use s3:// or pvc://"
                ]
            )
        return parsed
