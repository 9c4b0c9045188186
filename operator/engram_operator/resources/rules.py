"""The CEL rules of the CRD files, restated in Python with the same messages.

The API server evaluates the CEL; the laptop evaluates these. A test pairs each rule here with one of the CRD files by
field and message, and runs both over the same table of cases where a CEL library is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Rule:
    """`holds(self, old)` decides; a rule on a transition is only run when there is an old object."""

    at: tuple[str, ...]  # where the rule stands in the schema
    message: str
    holds: Callable[[Any, Any], bool]
    reported_at: tuple[str, ...] = ()  # below `at`: the CRD's fieldPath
    transition: bool = False


def _has(value: Mapping[str, Any], *names: str) -> bool:
    return all(name in value for name in names)


def _storage_class_is_used(spec: Any, _: Any) -> bool:
    cache = spec["cache"]
    claimed = cache["type"] == "PersistentVolumeClaim" and "claimName" in cache
    return not claimed or "storageClassName" not in cache


def _same_cache_type(spec: Any, old: Any) -> bool:
    return bool(spec["cache"]["type"] == old["cache"]["type"]) if "cache" in spec and "cache" in old else True


def _claims_need_type(cache: Any, _: Any) -> bool:
    return cache["type"] == "PersistentVolumeClaim" or not ("claimName" in cache or "storageClassName" in cache)


def _s3_has_credentials(storage: Any, _: Any) -> bool:
    return "credentialsSecretRef" in storage or storage["useWorkloadIdentity"] or not storage["uri"].startswith("s3://")


def _plain_http_is_meant(storage: Any, _: Any) -> bool:
    return not _has(storage, "endpointURL") or storage["endpointURL"].startswith("https://") or storage["insecure"]


def _same_optional(name: str) -> Callable[[Any, Any], bool]:
    return lambda spec, old: bool(spec.get(name) == old.get(name))


RULES: Mapping[str, tuple[Rule, ...]] = {
    "EngramModel": (
        Rule((), "name must be at most 50 characters", lambda o, _: len(o["metadata"]["name"]) <= 50),
        Rule(
            (),
            "name must be a DNS-1035 label (it becomes a Service and a pod hostname)",
            lambda o, _: _DNS_1035.fullmatch(o["metadata"]["name"]) is not None,
        ),
        Rule(("spec",), "cache.storageClassName has no effect with cache.claimName", _storage_class_is_used),
        Rule(
            ("spec",),
            "cache.type is immutable: it is part of the StatefulSet's volume claim templates",
            _same_cache_type,
            ("cache", "type"),
            transition=True,
        ),
        Rule(("spec", "cache"), "claimName and storageClassName need type PersistentVolumeClaim", _claims_need_type),
    ),
    "SnapshotPolicy": (
        Rule(
            ("spec", "storage"),
            "set credentialsSecretRef or useWorkloadIdentity, not both",
            lambda s, _: not ("credentialsSecretRef" in s and s["useWorkloadIdentity"]),
        ),
        Rule(
            ("spec", "storage"),
            "storage.uri is immutable: make a new policy and move the models to it",
            lambda s, old: bool(s["uri"] == old["uri"]),
            ("uri",),
            transition=True,
        ),
        Rule(
            ("spec", "storage"),
            "s3:// needs credentialsSecretRef or useWorkloadIdentity: true",
            _s3_has_credentials,
        ),
        Rule(("spec", "storage"), "an http:// endpointURL needs insecure: true", _plain_http_is_meant),
    ),
    "Snapshot": (
        Rule(
            ("spec",),
            "modelRef and source are immutable",
            lambda s, old: bool(s["modelRef"] == old["modelRef"] and s["source"] == old["source"]),
            transition=True,
        ),
        Rule(("spec",), "policyRef is immutable", _same_optional("policyRef"), transition=True),
        Rule(
            ("spec", "source"),
            "set conversation (take one now) or snapshotID (one that is stored)",
            lambda s, _: ("conversation" in s) != ("snapshotID" in s),
        ),
    ),
}


def broken(kind: str, document: Mapping[str, Any], old: Mapping[str, Any] | None) -> list[str]:
    """Messages of the rules that a valid, defaulted document breaks, each with its field path."""
    messages = []
    for rule in RULES.get(kind, ()):
        found, before = _at(document, rule.at), _at(old, rule.at)
        if found is None or (rule.transition and before is None):
            continue
        if not rule.holds(found, before):
            path = ".".join(rule.at + rule.reported_at) or "metadata.name"
            messages.append(f"{path}: {rule.message}")
    return messages


def _at(document: Mapping[str, Any] | None, path: tuple[str, ...]) -> Any:
    value: Any = document
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
