"""YAML files to resources. Every problem names the file and the document, and all problems are reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_operator.errors import MissingExtraError, ResourceError
from engram_operator.resources.model import EngramModel
from engram_operator.resources.policy import SnapshotPolicy
from engram_operator.resources.schema import Schemas

try:  # the extra may be absent: said when a file is read, so that `engram --help` works without it
    import yaml
except ImportError:
    yaml = None  # type: ignore[assignment]

DEFAULT_POLICY = "default"


@dataclass(frozen=True, slots=True)
class Resources:
    """What a set of files declares, in their order."""

    models: tuple[EngramModel, ...]
    policies: tuple[SnapshotPolicy, ...]


def load_files(paths: Sequence[Path], schemas: Schemas) -> Resources:
    """Read, validate and cross-check files. ResourceError with every problem found; OSError is one of them."""
    problems: list[str] = []
    models: list[EngramModel] = []
    policies: list[SnapshotPolicy] = []
    origin: dict[tuple[str, str, str], str] = {}
    for path in paths:
        try:
            documents = list(_documents(path))
        except ResourceError as error:
            problems += error.problems
            continue
        if not documents:
            problems.append(f"{path}: holds no document")
        for number, document in documents:
            where = _where(path, number, document)
            try:
                admitted = schemas.admit(document)
                metadata = admitted["metadata"]
                key = (admitted["kind"], metadata.get("namespace", "default"), metadata["name"])
                if key in origin:
                    raise ResourceError(
                        [f"metadata.name: declared twice in namespace {key[1]}; first in {origin[key]}"]
                    )
                origin[key] = str(path)
                if key[0] == "EngramModel":
                    models.append(EngramModel.parse(admitted))
                elif key[0] == "SnapshotPolicy":
                    policies.append(SnapshotPolicy.parse(admitted))
                else:
                    raise ResourceError(["kind: is made by a cluster's operator; here EngramModel and SnapshotPolicy"])
            except ResourceError as error:
                problems += error.within(where).problems
    if not problems and not models:
        problems.append(f"{', '.join(map(str, paths))}: no EngramModel in it")
    if problems:
        raise ResourceError(problems)
    resources = Resources(tuple(models), tuple(policies))
    for model in resources.models:
        try:
            select_policy(model, resources.policies)
        except ResourceError as error:
            where = f'{origin["EngramModel", model.namespace, model.name]}: EngramModel "{model.name}"'
            problems += error.within(where).problems
    if problems:
        raise ResourceError(problems)
    return resources


def select_policy(model: EngramModel, policies: Iterable[SnapshotPolicy]) -> SnapshotPolicy | None:
    """The policy a model names, else the namespace's `default`, else None. ResourceError: the named one is missing."""
    by_name = {policy.name: policy for policy in policies if policy.namespace == model.namespace}
    wanted = model.snapshots.policy
    if wanted is not None and wanted not in by_name:
        known = ", ".join(sorted(by_name)) or "none"
        raise ResourceError(
            [
                f'spec.snapshots.policyRef.name: no SnapshotPolicy "{wanted}" in namespace {model.namespace};'
                f" there is: {known}"
            ]
        )
    return by_name.get(wanted or DEFAULT_POLICY)


def _where(path: Path, number: int, document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    kind = document.get("kind")
    if isinstance(kind, str) and isinstance(name, str):
        return f'{path}: {kind} "{name}"'
    return f"{path}: document {number}"


def _documents(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The non-empty documents of a file, numbered from 1."""
    if yaml is None:
        raise MissingExtraError("pyyaml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ResourceError([f"{path}: {reason}"]) from error
    try:
        loaded = list(yaml.load_all(text, Loader=_unique_keys_loader()))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ResourceError([f"{path}: {line}{getattr(error, 'problem', None) or error}"]) from error
    for number, document in enumerate(loaded, 1):
        if document is None:
            continue
        if not isinstance(document, dict):
            raise ResourceError([f"{path}: document {number}: must be an object with apiVersion and kind"])
        yield number, document


def _unique_keys_loader() -> type[yaml.SafeLoader]:
    """The safe loader, refusing a key given twice: YAML would keep the last one silently."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key_node, _ in node.value:
                key = str(key_node.value)
                if key != "<<" and key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
            return super().construct_mapping(node, deep)

    return Loader
