"""SnapshotPolicy as typed values: where snapshots go, when, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engram_operator.errors import ResourceError
from engram_operator.resources.model import split_claim
from engram_operator.resources.quantity import parse_quantity


@dataclass(frozen=True, slots=True)
class StoreURI:
    scheme: Literal["s3", "pvc", "file"]
    text: str
    rest: str  # after "scheme://"

    @classmethod
    def parse(cls, text: str) -> StoreURI:
        """The CRD's pattern has checked the shape; ValueError for a path that climbs out."""
        scheme, _, rest = text.partition("://")
        if ".." in rest.split("/"):
            raise ValueError(f"must not hold '..', got {text!r}")
        if scheme == "pvc":
            split_claim(rest)
        return cls(scheme, text, rest)  # type: ignore[arg-type]

    @property
    def claim(self) -> tuple[str, str]:
        """Claim and path inside it of pvc://."""
        return split_claim(self.rest)


@dataclass(frozen=True, slots=True)
class StoreCredentials:
    """A Secret and the keys in it."""

    secret: str
    access_key_id: str
    secret_access_key: str
    session_token: str


@dataclass(frozen=True, slots=True)
class Storage:
    uri: StoreURI
    endpoint_url: str | None
    region: str
    force_path_style: bool
    credentials: StoreCredentials | None  # None: the pod's own identity, or a store that needs none
    ca_bundle: tuple[str, str] | None  # ConfigMap, key
    encryption: str | None
    kms_key_id: str | None


@dataclass(frozen=True, slots=True)
class Triggers:
    turn_end: bool
    idle_seconds: int
    drain: bool
    min_interval_seconds: int


@dataclass(frozen=True, slots=True)
class Retention:
    keep_last: int
    max_age: str
    max_conversations: int | None
    max_total_size: str | None
    gc_interval_seconds: int


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Field names follow the CRD's."""

    name: str
    namespace: str
    suspend: bool
    storage: Storage
    tenant_key: tuple[str, str] | None  # Secret, key; None: the namespace's own
    triggers: Triggers
    retention: Retention
    deletion_policy: str
    publish_mode: str
    publish_limit: int

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> SnapshotPolicy:
        """From an admitted document (Schemas.admit). ResourceError for what no schema can say."""
        spec, metadata = document["spec"], document["metadata"]
        retention, triggers, publish = spec["retention"], spec["triggers"], spec["publish"]
        problems = []
        uri = None
        try:
            uri = StoreURI.parse(spec["storage"]["uri"])
        except ValueError as error:
            problems.append(f"spec.storage.uri: {error}")
        quota = retention.get("maxTotalSize")
        if quota is not None:
            try:
                parse_quantity(quota)
            except ValueError as error:
                problems.append(f"spec.retention.maxTotalSize: {error}")
        if problems or uri is None:
            raise ResourceError(problems)
        key = spec.get("keySecretRef")
        return cls(
            name=metadata["name"],
            namespace=metadata.get("namespace", "default"),
            suspend=spec["suspend"],
            storage=_storage(uri, spec["storage"]),
            tenant_key=(key["name"], key["key"]) if key else None,
            triggers=Triggers(
                triggers["turnEnd"], triggers["idleSeconds"], triggers["drain"], triggers["minIntervalSeconds"]
            ),
            retention=Retention(
                keep_last=retention["keepLast"],
                max_age=retention["maxAge"],
                max_conversations=retention.get("maxConversations"),
                max_total_size=None if quota is None else str(quota),
                gc_interval_seconds=retention["gcIntervalSeconds"],
            ),
            deletion_policy=spec["deletionPolicy"],
            publish_mode=publish["mode"],
            publish_limit=publish["limit"],
        )


def _storage(uri: StoreURI, spec: Mapping[str, Any]) -> Storage:
    reference, bundle = spec.get("credentialsSecretRef"), spec.get("caBundle")
    return Storage(
        uri=uri,
        endpoint_url=spec.get("endpointURL"),
        region=spec["region"],
        force_path_style=spec["forcePathStyle"],
        credentials=StoreCredentials(
            reference["name"],
            reference["accessKeyIdKey"],
            reference["secretAccessKeyKey"],
            reference["sessionTokenKey"],
        )
        if reference
        else None,
        ca_bundle=(bundle["name"], bundle["key"]) if bundle else None,
        encryption=spec.get("serverSideEncryption"),
        kms_key_id=spec.get("kmsKeyId"),
    )
