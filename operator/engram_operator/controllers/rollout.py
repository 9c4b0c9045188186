"""Which pod template a StatefulSet gets: the one just rendered, or the one that its pods already run.

Pods restart for what a user changes, and for nothing else. A newer operator may render the same resource differently,
or bring another default image: the models keep what they run, the condition UpToDate says what waits, and the next
change of the spec takes it along. To know what "the same resource" is, the set carries the template it was given and a
hash of the user's input that it came from.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from engram_operator.builders.naming import RENDERER_ANNOTATION
from engram_operator.builders.settings import ENGINE
from engram_operator.kube.client import Object, fingerprint
from engram_operator.resources.quantity import parse_quantity
from engram_operator.settings import RollPolicy

RENDERED = "engram.dev/rendered"
ROLL = "engram.dev/roll"  # on the model: any new value takes a waiting upgrade in
# What of a model's spec never reaches a pod.
_NOT_IN_PODS = frozenset(
    {"replicas", "suspend", "scaleToZero", "podDisruptionBudget", "monitoring", "networkPolicy"}
)  # fmt: skip
_POLICY_IN_PODS = ("storage", "triggers", "retention", "suspend", "keySecretRef")
_MOST_RECORD = 1 << 20  # bytes of JSON: no pod template is near it
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Record:
    """What a StatefulSet was made from. `since`: when its template was last changed."""

    inputs: str
    since: datetime
    renderer: str
    template: Object


@dataclass(frozen=True, slots=True)
class Plan:
    """`rolls`: running pods will be replaced. `pending`: what an upgrade would change and does not."""

    stateful_set: Object
    since: datetime
    rolls: bool
    pending: str | None


def inputs_of(model: Object, policy: Object | None, defaults: Mapping[str, Any], policy_defaults: Any) -> str:
    """Hash of what users wrote that pods are made from. The two schemas tell what is a default: a default that a newer
    schema brings is no change by a user."""
    spec = {key: value for key, value in model["spec"].items() if key not in _NOT_IN_PODS}
    written: Object = {"model": _written(spec, defaults["properties"]["spec"])}
    written["roll"] = (model["metadata"].get("annotations") or {}).get(ROLL)
    if policy is not None:
        chosen = {key: policy["spec"][key] for key in _POLICY_IN_PODS if key in policy["spec"]}
        written["policy"] = _written(chosen, policy_defaults["properties"]["spec"])
    return fingerprint(written)


def plan(
    rendered: Object, live: Object | None, inputs: str, policy: RollPolicy, now: datetime, *, no_pods: bool
) -> Plan:
    """The StatefulSet to apply. `no_pods`: there is none that could be restarted."""
    template = rendered["spec"]["template"]
    renderer = rendered["metadata"]["annotations"][RENDERER_ANNOTATION]
    record = read_record(live) if live is not None else None
    if record is None or record.template == template:
        since = now.replace(microsecond=0) if record is None else record.since
        return Plan(_with_record(rendered, Record(inputs, since, renderer, template)), since, False, None)
    upgrade_only = record.inputs == inputs and policy is RollPolicy.ON_SPEC_CHANGE and not no_pods
    if upgrade_only:
        kept = _with_record(rendered, record)
        return Plan(kept, record.since, False, _pending(record, template, renderer, rendered["metadata"]["name"]))
    now = now.replace(microsecond=0)
    return Plan(_with_record(rendered, Record(inputs, now, renderer, template)), now, not no_pods, None)


def read_record(live: Mapping[str, Any]) -> Record | None:
    """None when there is none, or when it was damaged."""
    text = (live["metadata"].get("annotations") or {}).get(RENDERED) or ""
    digest, _, packed = text.partition(":")
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(base64.b64decode(packed, validate=True), _MOST_RECORD)
        if _digest(raw) != digest or unpacker.unconsumed_tail:
            return None
        fields = json.loads(raw)
        since = datetime.fromtimestamp(fields["since"], UTC)
        return Record(fields["inputs"], since, fields["renderer"], fields["template"])
    except (ValueError, KeyError, TypeError, zlib.error):
        return None


def immutable_problems(rendered: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """What the user changed that a StatefulSet cannot change: its claim templates."""
    before, after = (_claims(obj) for obj in (live, rendered))
    if before == after:
        return []
    problems = []
    if bool(before) != bool(after):
        problems.append("spec.cache.claimName: cannot be set or taken away later")
    for (_, size, storage_class), (_, new_size, new_class) in zip(before, after, strict=False):
        if parse_quantity(size) != parse_quantity(new_size):
            problems.append(f"spec.cache.size: cannot change from {size} to {new_size}")
        if new_class is not None and storage_class != new_class:
            problems.append(f"spec.cache.storageClassName: cannot change from {storage_class} to {new_class}")
    if problems:
        problems.append("the claims of a StatefulSet are fixed: put it back, or delete the model and make it anew")
    return problems


def _claims(obj: Mapping[str, Any]) -> list[tuple[str, str, str | None]]:
    found = []
    for claim in obj["spec"].get("volumeClaimTemplates") or ():
        spec = claim["spec"]
        size = str(spec["resources"]["requests"]["storage"])
        found.append((claim["metadata"]["name"], size, spec.get("storageClassName")))
    return found


def _with_record(rendered: Object, record: Record) -> Object:
    result = copy.deepcopy(rendered)
    result["spec"]["template"] = copy.deepcopy(record.template)
    fields = {
        "inputs": record.inputs,
        "renderer": record.renderer,
        "since": int(record.since.timestamp()),
        "template": record.template,
    }
    raw = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    annotations = result["metadata"]["annotations"]
    annotations[RENDERER_ANNOTATION] = record.renderer
    annotations[RENDERED] = f"{_digest(raw)}:{base64.b64encode(zlib.compress(raw, 9)).decode()}"
    return result


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:12]


def _pending(record: Record, template: Object, renderer: str, name: str) -> str:
    before, after = _image(record.template), _image(template)
    parts = []
    if before != after:
        parts.append(f"engine image {before} -> {after}")
    if record.renderer != renderer:
        parts.append(f"renderer {record.renderer} -> {renderer}")
    others = [path for path in _differences(record.template, template) if not path.endswith(".image")]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        parts.append(f"differs in {', '.join(others[:_SHOWN])}{more}")
    roll = fingerprint(template)[:8]
    return (
        f"the operator was upgraded and left the pods alone: {'; '.join(parts)}. The next change of the spec takes it"
        f" in, or: kubectl annotate engrammodel {name} {ROLL}={roll} --overwrite"
    )


def _image(template: Mapping[str, Any]) -> str:
    return next((c["image"] for c in template["spec"]["containers"] if c["name"] == ENGINE), "")


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(a, b, f"{path}[{index}]")
    elif old != new:
        yield path


def _written(value: Any, schema: Mapping[str, Any]) -> Any:
    """The value without what equals its default, and without what that leaves empty."""
    if not isinstance(value, Mapping) or "properties" not in schema:
        return value
    kept = {}
    for key, child in value.items():
        known = schema["properties"].get(key) or {}
        left = _written(child, known)
        if child == known.get("default") or (left == {} and "properties" in known):
            continue
        kept[key] = left
    return kept
