"""EngramModel as typed values: what the builders read, parsed once from an admitted document.

Parts of the pod API that are passed through (affinity, tolerations, valueFrom) stay plain dictionaries: Kubernetes owns
their meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engram_operator.errors import ResourceError
from engram_operator.resources.quantity import parse_quantity

Scheme = Literal["hf", "s3", "pvc", "file"]
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_SHAPES: Mapping[str, str] = {
    "hf": "hf://ORG/REPO",
    "s3": "s3://BUCKET/PREFIX",
    "pvc": "pvc://CLAIM or pvc://CLAIM/PATH",
    "file": "file:///ABSOLUTE/PATH",
}


def split_claim(rest: str) -> tuple[str, str]:
    """`CLAIM/a/b` as (claim, "a/b"); ValueError when it is not a claim's name or the path climbs out."""
    claim, _, path = rest.partition("/")
    path = path.strip("/")
    if not _CLAIM.fullmatch(claim) or ".." in path.split("/"):
        raise ValueError(f"must be {_SHAPES['pvc']} without '..'")
    return claim, path


@dataclass(frozen=True, slots=True)
class ModelURI:
    """Where a checkpoint is. `text` is the URI as written."""

    scheme: Scheme
    text: str
    rest: str  # after "scheme://"

    @classmethod
    def parse(cls, text: str) -> ModelURI:
        """ValueError says which shape the scheme takes."""
        scheme, _, rest = text.partition("://")
        good = {
            "hf": lambda: _REPO.fullmatch(rest) is not None,
            "s3": lambda: all(rest.partition("/")[::2]),
            "pvc": lambda: _CLAIM.fullmatch(rest.partition("/")[0]) is not None,
            "file": lambda: rest.startswith("/") and rest.strip("/") != "",
        }
        if scheme not in good:
            raise ValueError(f"must be one of {', '.join(_SHAPES.values())}, got {text!r}")
        if not good[scheme]() or ".." in rest.split("/"):
            raise ValueError(f"must be {_SHAPES[scheme]} without '..', got {text!r}")
        return cls(scheme, text, rest)  # type: ignore[arg-type]

    @property
    def path(self) -> str:
        """The absolute path of file://."""
        return "/" + self.rest.strip("/")

    @property
    def claim(self) -> tuple[str, str]:
        """Claim and path inside it of pvc://."""
        return split_claim(self.rest)


@dataclass(frozen=True, slots=True)
class Engine:
    image: str | None
    image_pull_policy: str
    args: tuple[str, ...]
    env: tuple[Mapping[str, Any], ...]
    dtype: str
    max_model_len: int | None
    max_concurrency: int
    startup_timeout_seconds: int


@dataclass(frozen=True, slots=True)
class Accelerator:
    resource_name: str  # empty: no GPU
    product: str | None
    count: int  # parallelism.tensor


@dataclass(frozen=True, slots=True)
class Scheduling:
    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...]
    affinity: Mapping[str, Any] | None
    topology_spread_constraints: tuple[Mapping[str, Any], ...]
    priority_class_name: str | None
    runtime_class_name: str | None
    scheduler_name: str | None


@dataclass(frozen=True, slots=True)
class Cache:
    type: Literal["EmptyDir", "PersistentVolumeClaim", "None"]
    size: str
    storage_class_name: str | None
    claim_name: str | None
    retain: bool


@dataclass(frozen=True, slots=True)
class SnapshotTiers:
    """Sizes as Kubernetes quantities, "0" for none."""

    enabled: bool
    policy: str | None
    host_memory: str
    disk: str


@dataclass(frozen=True, slots=True)
class Disruption:
    enabled: bool
    max_unavailable: int | str


@dataclass(frozen=True, slots=True)
class Monitoring:
    enabled: bool
    labels: Mapping[str, str]
    interval: str


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    enabled: bool
    sources: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class EngramModel:
    """One model to serve. Field names follow the CRD's."""

    name: str
    namespace: str
    uid: str | None  # None: not from an API server
    uri: ModelURI
    revision: str | None
    served_name: str
    credentials_secret: str | None
    replicas: int
    suspend: bool
    idle_seconds: int | None  # None: never scaled to zero
    engine: Engine
    accelerator: Accelerator
    requests: Mapping[str, int | str]
    limits: Mapping[str, int | str]
    scheduling: Scheduling
    cache: Cache
    snapshots: SnapshotTiers
    api_keys_secret: str | None
    service_account: str | None
    drain_timeout_seconds: int
    progress_deadline_seconds: int
    disruption: Disruption
    monitoring: Monitoring
    network_policy: NetworkPolicy
    pod_template: Mapping[str, Any]

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> EngramModel:
        """From an admitted document (Schemas.admit). ResourceError for what no schema can say."""
        spec, metadata = document["spec"], document["metadata"]
        problems: list[str] = []
        uri = None
        try:
            uri = ModelURI.parse(spec["model"]["uri"])
        except ValueError as error:
            problems.append(f"spec.model.uri: {error}")
        if uri is not None and uri.scheme != "hf" and spec["model"].get("revision"):
            problems.append("spec.model.revision: only hf:// has revisions")
        if str(spec["model"].get("name", "")).startswith("-"):
            problems.append("spec.model.name: must not begin with '-'")
        sizes = {("cache", "size"), ("snapshots", "hostMemory"), ("snapshots", "disk")}
        for part, field in sorted(sizes):
            problems += _quantity_problems(f"spec.{part}.{field}", spec[part][field])
        resources = spec.get("resources") or {}
        for part in ("requests", "limits"):
            for name, amount in (resources.get(part) or {}).items():
                problems += _quantity_problems(f"spec.resources.{part}.{name}", amount)
        if problems or uri is None:
            raise ResourceError(problems)
        update = spec["updateStrategy"]
        return cls(
            name=metadata["name"],
            namespace=metadata.get("namespace", "default"),
            uid=metadata.get("uid"),
            uri=uri,
            revision=spec["model"].get("revision") or None,
            served_name=spec["model"].get("name") or metadata["name"],
            credentials_secret=_name_of(spec["model"].get("credentialsSecretRef")),
            replicas=spec["replicas"],
            suspend=spec["suspend"],
            idle_seconds=spec["scaleToZero"]["idleSeconds"] if "scaleToZero" in spec else None,
            engine=_engine(spec["engine"]),
            accelerator=Accelerator(
                spec["accelerator"]["resourceName"],
                spec["accelerator"].get("product"),
                spec["parallelism"]["tensor"],
            ),
            requests=resources.get("requests") or {},
            limits=resources.get("limits") or {},
            scheduling=_scheduling(spec["scheduling"]),
            cache=_cache(spec["cache"]),
            snapshots=SnapshotTiers(
                spec["snapshots"]["enabled"],
                _name_of(spec["snapshots"].get("policyRef")),
                str(spec["snapshots"]["hostMemory"]),
                str(spec["snapshots"]["disk"]),
            ),
            api_keys_secret=_name_of((spec.get("auth") or {}).get("apiKeysSecretRef")),
            service_account=spec.get("serviceAccountName") or None,
            drain_timeout_seconds=update["drainTimeoutSeconds"],
            progress_deadline_seconds=update["progressDeadlineSeconds"],
            disruption=Disruption(
                spec["podDisruptionBudget"]["enabled"], spec["podDisruptionBudget"]["maxUnavailable"]
            ),
            monitoring=Monitoring(
                spec["monitoring"]["enabled"],
                spec["monitoring"].get("labels") or {},
                spec["monitoring"]["interval"],
            ),
            network_policy=NetworkPolicy(
                spec["networkPolicy"]["enabled"], tuple(spec["networkPolicy"].get("from") or ())
            ),
            pod_template=spec.get("podTemplate") or {},
        )


def _engine(spec: Mapping[str, Any]) -> Engine:
    return Engine(
        image=spec.get("image") or None,
        image_pull_policy=spec["imagePullPolicy"],
        args=tuple(spec.get("args") or ()),
        env=tuple(spec.get("env") or ()),
        dtype=spec["dtype"],
        max_model_len=spec.get("maxModelLen"),
        max_concurrency=spec["maxConcurrency"],
        startup_timeout_seconds=spec["startupTimeoutSeconds"],
    )


def _scheduling(spec: Mapping[str, Any]) -> Scheduling:
    return Scheduling(
        node_selector=spec.get("nodeSelector") or {},
        tolerations=tuple(spec.get("tolerations") or ()),
        affinity=spec.get("affinity"),
        topology_spread_constraints=tuple(spec.get("topologySpreadConstraints") or ()),
        priority_class_name=spec.get("priorityClassName") or None,
        runtime_class_name=spec.get("runtimeClassName") or None,
        scheduler_name=spec.get("schedulerName") or None,
    )


def _cache(spec: Mapping[str, Any]) -> Cache:
    return Cache(
        type=spec["type"],
        size=str(spec["size"]),
        storage_class_name=spec.get("storageClassName"),
        claim_name=spec.get("claimName") or None,
        retain=spec["retain"],
    )


def _name_of(reference: Mapping[str, Any] | None) -> str | None:
    return str(reference["name"]) if reference else None


def _quantity_problems(path: str, value: int | str) -> list[str]:
    try:
        parse_quantity(value)
    except ValueError as error:
        return [f"{path}: {error}"]
    return []
