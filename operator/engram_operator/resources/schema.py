"""The CRD files as validators: pruning refused, defaults filled in, schema checked, in the API server's order.

A CRD schema is OpenAPI v3 with Kubernetes' extensions. Its JSON Schema part is checked by `jsonschema`; what that does
not know (unknown fields, lists that are maps, formats with a range) is done here. Messages are ours: they name the
field's path and what is allowed, which a person can act on.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engram_operator.errors import MissingExtraError, ResourceError
from engram_operator.resources import rules

try:  # the extra may be absent: said when a file is read, so that `engram --help` works without it
    import jsonschema
    import yaml
except ImportError as error:
    _missing: str | None = error.name or "jsonschema"
else:
    _missing = None

GROUP = "engram.dev"
API_VERSION = f"{GROUP}/v1alpha1"

_INTEGER_RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
_OBJECT_META = frozenset(
    {
        "name", "namespace", "labels", "annotations", "uid", "generation", "resourceVersion", "creationTimestamp",
        "managedFields", "ownerReferences", "finalizers", "generateName", "deletionTimestamp",
        "deletionGracePeriodSeconds", "selfLink",
    }
)  # fmt: skip
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_ARTICLES = {"integer": "an integer", "object": "an object", "array": "a list", "boolean": "true or false"}


def crd_folder() -> Path:
    """Where the CRD files are: inside an installed package, at the top of a source checkout."""
    package = Path(__file__).parent.parent
    for folder in (package / "crds", package.parent.parent / "crds"):
        if (folder / "engrammodels.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no CRD files beside {package}: the installation is damaged")


class Schemas:
    """The schemas of all kinds in the CRD files. Immutable once loaded; make one and pass it on."""

    def __init__(self, schemas: Mapping[str, dict[str, Any]]) -> None:
        self._schemas = dict(schemas)
        self._plain = {kind: _plain(schema) for kind, schema in self._schemas.items()}

    @classmethod
    def load(cls, folder: Path | None = None) -> Schemas:
        """Read the CRD files. MissingExtraError when the `operator` extra is not installed."""
        if _missing:
            raise MissingExtraError(_missing)
        found = {}
        for path in sorted((folder or crd_folder()).glob("*.yaml")):
            definition = yaml.safe_load(path.read_text())
            version = next(v for v in definition["spec"]["versions"] if v["storage"])
            found[definition["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
        return cls(found)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._schemas)

    def schema(self, kind: str) -> dict[str, Any]:
        """The kind's openAPIV3Schema, as in the CRD file. Not to be changed."""
        return self._schemas[kind]

    def admit(self, document: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The document with defaults, if the API server would take it. ResourceError with every problem otherwise.

        `old` is the stored object, admitted earlier, when this one replaces it: rules on transitions need it.
        """
        problems = list(self._envelope(document))
        if problems:
            raise ResourceError(problems)
        kind = document["kind"]
        schema = self._schemas[kind]
        admitted: dict[str, Any] = _without_nulls(schema, copy.deepcopy(dict(document)))
        problems += _unknown_fields(schema, admitted, "")
        _fill_defaults(schema, admitted)
        validator = jsonschema.Draft202012Validator(self._plain[kind])
        found = sorted(validator.iter_errors(admitted), key=lambda e: [str(part) for part in e.absolute_path])
        for error in found:
            problems += _messages(error)
        problems += _duplicate_keys(schema, admitted, "")
        if not problems:
            problems += rules.broken(kind, admitted, old)
        if problems:
            raise ResourceError(problems)
        return admitted

    def defaulted(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """An object that an API server took, with the defaults its definition there may be too old to have.

        Nothing is checked again: a definition may also be newer than this program, with fields it does not know.
        """
        schema = self._schemas[document["kind"]]
        filled: dict[str, Any] = _without_nulls(schema, copy.deepcopy(dict(document)))
        _fill_defaults(schema, filled)
        return filled

    def _envelope(self, document: Mapping[str, Any]) -> Iterator[str]:
        kind = document.get("kind")
        if kind not in self._schemas:
            yield f"kind: must be one of {', '.join(sorted(self._schemas))}, got {_shown(kind)}" + _hint(
                str(kind), self._schemas
            )
            return
        if document.get("apiVersion") != API_VERSION:
            yield f"apiVersion: must be {API_VERSION}, got {_shown(document.get('apiVersion'))}"
        metadata = document.get("metadata")
        if not isinstance(metadata, Mapping):
            yield "metadata: must be an object with a name"
            return
        for field in metadata:
            if field not in _OBJECT_META:
                yield f"metadata.{field}: unknown field" + _hint(str(field), _OBJECT_META)
        name = metadata.get("name")
        if not isinstance(name, str) or not name:
            yield (
                f"metadata.name: must be a string, got {_shown(name)}"
                if "name" in metadata
                else ("metadata.name: required")
            )
        elif not _NAME.fullmatch(name) or len(name) > 253:
            yield f"metadata.name: must be lower-case letters, digits, '-' and '.', got {_shown(name)}"
        namespace = metadata.get("namespace", "default")
        if not isinstance(namespace, str) or not _NAME.fullmatch(namespace) or "." in namespace or len(namespace) > 63:
            yield f"metadata.namespace: must be a DNS label, got {_shown(namespace)}"
        for field in ("labels", "annotations"):
            entries = metadata.get(field) or {}
            if not isinstance(entries, Mapping) or not all(
                isinstance(k, str) and isinstance(v, str) for k, v in entries.items()
            ):
                yield f"metadata.{field}: must map strings to strings (quote numbers and booleans)"


def _plain(schema: Any) -> Any:
    """The JSON Schema part: extensions dropped, formats with a range made explicit, `$` made to mean the end."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for key, value in schema.items():
        if key.startswith("x-kubernetes-"):
            continue
        if key == "pattern":
            value = re.sub(r"\$$", r"\\Z", value)
        elif key == "properties":
            value = {name: _plain(child) for name, child in value.items()}
        elif key in ("items", "additionalProperties", "anyOf"):
            value = _plain(value)
        plain[key] = value
    if plain.get("type") == "integer" and plain.get("format") in _INTEGER_RANGES:
        low, high = _INTEGER_RANGES[plain["format"]]
        plain.setdefault("minimum", low)
        plain.setdefault("maximum", high)
    return plain


def _without_nulls(schema: Mapping[str, Any], value: Any) -> Any:
    """Null for a field that is not nullable counts as absent, as in the API server; where anything goes, it stays."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict):
        known = schema.get("properties") or {}
        return {key: _without_nulls(known.get(key, {}), child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [_without_nulls(schema.get("items") or {}, child) for child in value]
    return value


def _fill_defaults(schema: Mapping[str, Any], value: Any) -> None:
    if isinstance(value, dict):
        for name, child in (schema.get("properties") or {}).items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if name in value:
                _fill_defaults(child, value[name])
    elif isinstance(value, list):
        for item in value:
            _fill_defaults(schema.get("items") or {}, item)


def _unknown_fields(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        known = schema.get("properties") or {}
        if path == "metadata":
            return
        strict = "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields")
        for name, child in value.items():
            where = f"{path}.{name}" if path else str(name)
            if name in known:
                yield from _unknown_fields(known[name], child, where)
            elif strict and schema.get("type") == "object":
                yield f"{where}: unknown field" + _hint(str(name), known)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_fields(schema.get("items") or {}, item, f"{path}[{index}]")


def _duplicate_keys(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, child in (schema.get("properties") or {}).items():
            if name in value:
                yield from _duplicate_keys(child, value[name], f"{path}.{name}" if path else name)
    elif isinstance(value, list) and schema.get("x-kubernetes-list-type") == "map":
        keys = schema["x-kubernetes-list-map-keys"]
        seen: set[tuple[Any, ...]] = set()
        for index, item in enumerate(value):
            key = tuple(item.get(k) for k in keys) if isinstance(item, dict) else ()
            if key in seen:
                yield f"{path}[{index}]: duplicate {', '.join(keys)} {', '.join(map(str, key))}"
            seen.add(key)


def _messages(error: Any) -> Iterator[str]:
    """One jsonschema error as our message. `error` is a jsonschema ValidationError (the library has no types)."""
    path = ""
    for part in error.absolute_path:
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
    got, limit = _shown(error.instance), error.validator_value
    what = error.schema.get("description")
    match error.validator:
        case "required":
            missing = [name for name in limit if name not in error.instance]
            yield from (f"{path}.{name}: required" if path else f"{name}: required" for name in missing)
        case "minimum":
            yield f"{path}: must be >= {limit}, got {got}"
        case "maximum":
            yield f"{path}: must be <= {limit}, got {got}"
        case "minLength":
            yield f"{path}: must have at least {limit} character{'s' if limit > 1 else ''}, got {got}"
        case "maxLength":
            yield f"{path}: must have at most {limit} characters, got {len(error.instance)}"
        case "maxItems":
            yield f"{path}: must have at most {limit} items, got {len(error.instance)}"
        case "enum":
            allowed = ", ".join(str(item) for item in limit)
            yield f"{path}: must be one of {allowed}, got {got}" + _hint(str(error.instance), [str(i) for i in limit])
        case "pattern":
            shape = str(error.schema["pattern"]).removesuffix(r"\Z").removeprefix("^")
            yield f"{path}: must match {shape}, got {got}" + (f" ({what.rstrip('.')})" if what else "")
        case "type":
            yield f"{path}: must be {_ARTICLES.get(limit, f'a {limit}')}, got {got}"
        case "anyOf":
            yield f"{path}: must be an integer or a string, got {got}"
        case _:
            yield f"{path}: {error.message}"


def _hint(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    if not close:  # case is the other usual slip: servedname, Replicas
        close = [k for k in sorted(known) if k.lower() == name.lower()]
    return f"; did you mean {close[0]}?" if close else ""


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
