"""Images without a registry: a folder in the OCI layout that images are written to and archived from.

Layers stay uncompressed: nothing is sent over a network, and compressing 250 MB is what takes the time. An archive can
leave out the blobs that the nodes already have ("thin"), which makes a rebuilt image a matter of kilobytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
NAME_KEY = "org.opencontainers.image.ref.name"
CHUNK = 1 << 20
Descriptor = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a layout: its name and its manifest's descriptor."""

    name: str
    manifest: Descriptor


class Layout:
    """A folder in the OCI image layout. Blobs are named by content, so writing one twice changes nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        if not (folder / "index.json").exists():
            self._write_index([])

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def put(self, data: bytes, media_type: str) -> Descriptor:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if not self.blob(digest).exists():
            partial = self.blob(f".{os.getpid()}.partial")
            partial.write_bytes(data)
            partial.rename(self.blob(digest))
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def put_layer(self, path: Path) -> Descriptor:
        """Moves an uncompressed tar file in."""
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        name = f"sha256:{digest.hexdigest()}"
        descriptor = {"mediaType": LAYER, "digest": name, "size": path.stat().st_size}
        path.rename(self.blob(name))
        return descriptor

    def image(
        self,
        name: str,
        layers: Sequence[Descriptor],
        *,
        base: Image | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Image:
        """Writes an image of `layers` above `base`; `config` overrides single fields of the base's (Env is merged)."""
        below = self.manifest(base)["layers"] if base else []
        inherited = self.config(base) if base else {"config": {}, "rootfs": {"diff_ids": []}, "history": []}
        merged = {**inherited["config"], **(config or {})}
        merged["Env"] = _merged(inherited["config"].get("Env", []), (config or {}).get("Env", []))
        diffs = [*inherited["rootfs"]["diff_ids"], *(layer["digest"] for layer in layers)]
        document = {
            "architecture": "amd64",
            "os": "linux",
            "config": merged,
            "rootfs": {"type": "layers", "diff_ids": diffs},
            "history": [*inherited["history"], *({"created_by": name} for _ in layers)],  # buildah counts them
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.put(json.dumps(document, sort_keys=True).encode(), CONFIG),
            "layers": [*below, *layers],
        }
        return self._tag(name, self.put(json.dumps(manifest, sort_keys=True).encode(), MANIFEST))

    def find(self, name: str) -> Image | None:
        for entry in self._entries():
            if _name(entry) == name:
                return Image(name, {key: entry[key] for key in ("mediaType", "digest", "size")})
        return None

    def manifest(self, image: Image) -> dict[str, Any]:
        return dict(json.loads(self.blob(image.manifest["digest"]).read_text()))

    def config(self, image: Image) -> dict[str, Any]:
        return dict(json.loads(self.blob(self.manifest(image)["config"]["digest"]).read_text()))

    def layers(self, image: Image) -> list[str]:
        return [layer["digest"] for layer in self.manifest(image)["layers"]]

    def archive(self, images: Iterable[Image], path: Path, *, without: Collection[str] = ()) -> None:
        """Writes a tar file that `ctr images import` takes, without the layers whose digests are in `without`."""
        blobs: dict[str, None] = {}
        index = []
        for image in images:
            manifest = self.manifest(image)
            index.append({**image.manifest, "annotations": {"io.containerd.image.name": image.name}})
            for digest in (image.manifest["digest"], manifest["config"]["digest"], *self.layers(image)):
                if digest not in without:
                    blobs[digest] = None
        with tarfile.open(path, "w") as tar:
            _add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": index}).encode())
            for digest in blobs:
                tar.add(self.blob(digest), arcname=f"blobs/sha256/{digest.removeprefix('sha256:')}")

    def prune(self, prefix: str, keep: int) -> None:
        """Removes all but the newest few of the images whose names begin so, and blobs that no image has."""
        entries = self._entries()
        old = [entry for entry in entries if _name(entry).startswith(prefix)][:-keep]
        if not old:
            return
        kept = [entry for entry in entries if entry not in old]
        self._write_index(kept)
        used = set()
        for entry in kept:
            manifest = json.loads(self.blob(entry["digest"]).read_text())
            parts = (entry, manifest["config"], *manifest["layers"])
            used |= {self.blob(part["digest"]).name for part in parts}
        for path in (self.folder / "blobs" / "sha256").iterdir():
            if path.name not in used:
                path.unlink()

    def _tag(self, name: str, manifest: Descriptor) -> Image:
        kept = [entry for entry in self._entries() if _name(entry) != name]
        self._write_index([*kept, {**manifest, "annotations": {NAME_KEY: name}}])
        return Image(name, manifest)

    def _entries(self) -> list[dict[str, Any]]:
        """Oldest first."""
        return list(json.loads((self.folder / "index.json").read_text())["manifests"])

    def _write_index(self, manifests: list[dict[str, Any]]) -> None:
        partial = self.folder / f".index.{os.getpid()}"
        partial.write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
        partial.rename(self.folder / "index.json")


def tree_layer(path: Path, sources: Mapping[str, Path], scripts: Mapping[str, str] | None = None) -> None:
    """Writes a layer to `path`: each source folder or file under its absolute destination, and executable scripts.

    Owned by root, readable by all, without times: equal content gives an equal digest.
    """

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = 0
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with tarfile.open(path, "w") as tar:
        for destination, source in sorted(sources.items()):
            tar.add(source, arcname=destination.lstrip("/"), filter=plain)
        for destination, text in sorted((scripts or {}).items()):
            _add(tar, destination.lstrip("/"), text.encode(), mode=0o755)


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("annotations", {}).get(NAME_KEY, ""))


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def _merged(*lists: Sequence[str]) -> list[str]:
    values = dict(entry.split("=", 1) for entries in lists for entry in entries)
    return [f"{name}={value}" for name, value in values.items()]
