"""Volumes of a pod as folders of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engram_operator.builders.settings import SHM_PATH
from engram_operator.local.secrets import LocalSecrets, variable_prefix

UNMAPPED = " cannot be mapped to a local process"


class PodVolumes:
    """The pod's volumes as folders; collects what must be made before the pod starts."""

    def __init__(self, namespace: str, pod: str, state_dir: Path, secrets: LocalSecrets) -> None:
        self.namespace, self.pod = namespace, pod
        self.folder = state_dir / "pods" / namespace / pod
        self.problems: list[str] = []
        self.clear: list[Path] = [self.folder / "volumes"]
        self.keep: list[Path] = []
        self.files: dict[Path, bytes] = {}
        self._claims = state_dir / "volumes" / namespace
        self._secrets = secrets
        self._folders: dict[str, Path] = {}

    def keep_claim(self, volume: str, claim: str) -> None:
        self._folders[volume] = self._claims / claim
        self.keep.append(self._claims / claim)

    def add(self, volume: Mapping[str, Any]) -> None:
        name = volume["name"]
        folder = self.folder / "volumes" / name
        match [kind for kind in volume if kind != "name"]:
            case ["emptyDir"]:
                self._folders[name] = folder
                self.clear.append(folder)
            case ["persistentVolumeClaim"]:
                self.keep_claim(name, volume["persistentVolumeClaim"]["claimName"])
            case ["secret"]:
                self._folders[name] = folder
                source = volume["secret"]
                self._add_secret(folder, source["secretName"], source)
            case ["projected"]:
                self._folders[name] = folder
                for index, source in enumerate(volume["projected"].get("sources") or []):
                    if set(source) == {"secret"}:
                        self._add_secret(folder, source["secret"]["name"], source["secret"])
                    else:
                        kind = ", ".join(source)
                        self.problems.append(
                            f"pod field spec.volumes[{name}].projected.sources[{index}].{kind}{UNMAPPED}"
                        )
            case kinds:
                self.problems.append(f"pod field spec.volumes[{name}].{', '.join(kinds)}{UNMAPPED}")

    def mount(self, container: str, mount: Mapping[str, Any]) -> Path | None:
        """The folder behind a mount; None for one that stays this machine's own."""
        if mount["mountPath"] == SHM_PATH:
            return None
        for field in mount:
            if field not in ("name", "mountPath", "readOnly", "subPath"):
                self.problems.append(f"pod field spec.containers[{container}].volumeMounts.{field}{UNMAPPED}")
        folder = self._folders.get(mount["name"])
        if folder is None:
            self.problems.append(f"pod field spec.containers[{container}].volumeMounts: no volume {mount['name']}")
            return None
        if sub_path := mount.get("subPath"):
            folder = self._inside(folder, sub_path, f"spec.containers[{container}].volumeMounts.subPath")
            self.keep.append(folder)
        return folder

    def secret_value(self, reference: Mapping[str, Any], where: str) -> str | None:
        """A variable from a Secret; None when it is optional and not given."""
        data = self._secrets.read(reference["name"])
        if reference["key"] in data:
            return data[reference["key"]].decode()
        if not reference.get("optional"):
            self.problems.append(f"{where}: {_missing_secret(reference['name'], reference['key'])}")
        return None

    def _add_secret(self, folder: Path, secret: str, source: Mapping[str, Any]) -> None:
        data = self._secrets.read(secret)
        optional = source.get("optional", False)
        items = source.get("items")
        wanted = {item["key"]: item["path"] for item in items} if items else {key: key for key in data}
        self.keep.append(folder)
        if not data and not optional:
            self.problems.append(_missing_secret(secret, *wanted))
            return
        for key, path in wanted.items():
            if key in data:
                self.files[self._inside(folder, path, f"spec.volumes[{folder.name}].items.path")] = data[key]
            elif not optional:
                self.problems.append(_missing_secret(secret, key))

    def _inside(self, folder: Path, path: str, where: str) -> Path:
        if path.startswith("/") or ".." in path.split("/"):
            self.problems.append(f"pod field {where}: must be a relative path without '..', got {path!r}")
        return folder / path


def _missing_secret(secret: str, *keys: str) -> str:
    lines = ", ".join(f"{variable_prefix(secret)}__{key}=..." for key in keys or ("KEY",))
    return f'Secret "{secret}" is missing: write {lines} to a file and give it as --env-file'
