"""podTemplate, the escape hatch: merged over the pod last, with what would leave the sandbox refused.

The merge is Kubernetes' strategic merge for the lists people touch: containers, volumes and the like by name, volume
mounts by path, tolerations appended. Every other list is replaced, every object merged, field by field.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engram_operator.builders.pod import container_security
from engram_operator.builders.settings import ENGINE
from engram_operator.errors import ResourceError

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
}
_APPENDED = frozenset({"tolerations", "topologySpreadConstraints"})
_HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
_SET_BY_US = ("restartPolicy", "serviceAccount", "serviceAccountName", "hostname", "subdomain", "nodeName")
_POD_TYPES = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "tolerations", "topologySpreadConstraints"), "objects"),
    **dict.fromkeys(("imagePullSecrets", "hostAliases", "ephemeralContainers"), "objects"),
    **dict.fromkeys(("securityContext", "affinity", "nodeSelector"), "object"),
}
_CONTAINER_TYPES = {
    **dict.fromkeys(("env", "envFrom", "ports", "volumeMounts"), "objects"),
    **dict.fromkeys(("securityContext", "resources", "lifecycle"), "object"),
    **dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), "object"),
    **dict.fromkeys(("command", "args"), "strings"),
}
_WHERE = "spec.podTemplate"


def apply_overlay(template: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """The pod template with podTemplate merged in. ResourceError names each field that may not be set."""
    problems = list(_shape_problems(template, overlay))
    if problems:
        raise ResourceError(problems)
    merged: dict[str, Any] = _merge(copy.deepcopy(dict(template)), copy.deepcopy(dict(overlay)))
    spec = merged["spec"]
    for container in _containers(spec):
        container["securityContext"] = {**container_security(), **(container.get("securityContext") or {})}
    problems = list(_unsafe(spec))
    if problems:
        raise ResourceError(problems)
    return merged


def _merge(base: Any, over: Any, field: str = "") -> Any:
    if isinstance(base, dict) and isinstance(over, Mapping):
        for key, value in over.items():
            if value is None:  # null takes a field out: a probe's httpGet, before another handler is put in
                base.pop(key, None)
            else:
                base[key] = _merge(base[key], value, key) if key in base else value
        return base
    if isinstance(base, list) and isinstance(over, Sequence) and not isinstance(over, str):
        if field in _APPENDED:
            return [*base, *over]
        key = _MERGE_KEYS.get(field)
        if key is not None:
            return _merge_lists(base, over, key)
    return over


def _merge_lists(base: list[Any], over: Sequence[Any], key: str) -> list[Any]:
    merged = list(base)
    positions = {item.get(key): index for index, item in enumerate(merged) if isinstance(item, dict)}
    for item in over:
        index = positions.get(item.get(key)) if isinstance(item, Mapping) else None
        if index is None:
            merged.append(item)
        elif key == "name" and _replaces_source(merged[index], item):
            merged[index] = dict(item)  # a volume or variable has one source: two merged would be invalid
        else:
            merged[index] = _merge(merged[index], item)
    return merged


def _replaces_source(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """True for a volume or a variable whose new definition names another source than the old one."""
    if "image" in old or "command" in old:
        return False
    return not (set(old) & set(new) - {"name"})


def _shape_problems(template: Mapping[str, Any], overlay: Mapping[str, Any]) -> Iterator[str]:
    """What can be said without the pod's schema: the API server's dry-run says the rest."""
    yield from _unknown(overlay, ("metadata", "spec"), _WHERE)
    meta, spec = overlay.get("metadata", {}), overlay.get("spec", {})
    for value, where in ((meta, "metadata"), (spec, "spec")):
        if not isinstance(value, Mapping):
            yield f"{_WHERE}.{where}: must be an object"
            return
    yield from _unknown(meta, ("labels", "annotations"), f"{_WHERE}.metadata")
    for field in ("labels", "annotations"):
        entries = meta.get(field, {})
        ours = template["metadata"][field]
        if not isinstance(entries, Mapping) or not all(isinstance(value, str) for value in entries.values()):
            yield f"{_WHERE}.metadata.{field}: must map strings to strings (quote numbers and booleans)"
            continue
        yield from (f"{_WHERE}.metadata.{field}.{name}: is set by the operator" for name in entries if name in ours)
    for field in _SET_BY_US:
        if field in spec:
            other = "; use spec.serviceAccountName" if field.startswith("serviceAccount") else ""
            yield f"{_WHERE}.spec.{field}: may not be set{other}"
    yield from _type_problems(spec, _POD_TYPES, f"{_WHERE}.spec")
    for field in ("containers", "initContainers", "volumes"):
        for index, entry in enumerate(_objects(spec.get(field))):
            where = f"{_WHERE}.spec.{field}[{index}]"
            if not isinstance(entry.get("name"), str):
                yield f"{where}.name: required"
            if field != "volumes":
                yield from _type_problems(entry, _CONTAINER_TYPES, where)
                yield from _context_problems(entry.get("securityContext"), f"{where}.securityContext")
            if field == "containers" and entry.get("name") == ENGINE and "args" in entry:
                yield f"{where}.args: use spec.engine.args"
    yield from _context_problems(spec.get("securityContext"), f"{_WHERE}.spec.securityContext")


def _type_problems(value: Mapping[str, Any], types: Mapping[str, str], where: str) -> Iterator[str]:
    for field, kind in types.items():
        if field not in value:
            continue
        found = value[field]
        if kind == "object" and not isinstance(found, Mapping | None):
            yield f"{where}.{field}: must be an object"
        elif kind == "objects" and not (isinstance(found, list) and all(isinstance(item, Mapping) for item in found)):
            yield f"{where}.{field}: must be a list of objects"
        elif kind == "strings" and not (isinstance(found, list) and all(isinstance(item, str) for item in found)):
            yield f"{where}.{field}: must be a list of strings"


def _context_problems(context: Any, where: str) -> Iterator[str]:
    if isinstance(context, Mapping):
        yield from _type_problems(context, {"seccompProfile": "object", "capabilities": "object"}, where)
        capabilities = context.get("capabilities")
        if isinstance(capabilities, Mapping):
            yield from _type_problems(capabilities, {"add": "strings", "drop": "strings"}, f"{where}.capabilities")


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _unsafe(spec: Mapping[str, Any]) -> Iterator[str]:
    """What may not be in a pod, however it came in; the restricted Pod Security Standard and a little more."""
    for field in _HOST_FIELDS:
        if spec.get(field):
            yield f"{_WHERE}.spec.{field}: not allowed"
    if spec.get("ephemeralContainers"):
        yield f"{_WHERE}.spec.ephemeralContainers: not allowed"
    for index, volume in enumerate(spec.get("volumes") or []):
        if "hostPath" in volume:
            yield f"{_WHERE}.spec.volumes[{index}].hostPath: not allowed ({volume['name']})"
    yield from _unsafe_context(spec.get("securityContext") or {}, f"{_WHERE}.spec.securityContext")
    if (spec.get("securityContext") or {}).get("sysctls"):
        yield f"{_WHERE}.spec.securityContext.sysctls: not allowed"
    for field in ("initContainers", "containers"):
        for container in spec.get(field) or []:
            where = f"{_WHERE}.spec.{field}[{container['name']}]"
            context = container["securityContext"]
            yield from _unsafe_context(context, f"{where}.securityContext")
            if context.get("privileged"):
                yield f"{where}.securityContext.privileged: not allowed"
            if context.get("allowPrivilegeEscalation"):
                yield f"{where}.securityContext.allowPrivilegeEscalation: not allowed"
            if context.get("procMount", "Default") != "Default":
                yield f"{where}.securityContext.procMount: not allowed"
            capabilities = context.get("capabilities") or {}
            if capabilities.get("add"):
                yield f"{where}.securityContext.capabilities.add: not allowed"
            if "ALL" not in (capabilities.get("drop") or []):
                yield f"{where}.securityContext.capabilities.drop: must hold ALL"
            for index, port in enumerate(container.get("ports") or []):
                if "hostPort" in port:
                    yield f"{where}.ports[{index}].hostPort: not allowed"


def _unsafe_context(context: Mapping[str, Any], where: str) -> Iterator[str]:
    if context.get("runAsNonRoot") is False:
        yield f"{where}.runAsNonRoot: must be true"
    for field in ("runAsUser", "runAsGroup", "fsGroup"):
        if context.get(field) == 0:
            yield f"{where}.{field}: must not be 0"
    if (context.get("seccompProfile") or {}).get("type") == "Unconfined":
        yield f"{where}.seccompProfile.type: must not be Unconfined"


def _containers(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*(spec.get("initContainers") or []), *spec["containers"]]


def _unknown(value: Mapping[str, Any], known: Sequence[str], where: str) -> Iterator[str]:
    for name in value:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            yield f"{where}.{name}: may not be set" + (f"; did you mean {close[0]}?" if close else "")
