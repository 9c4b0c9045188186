"""A checkpoint directory as one set of named tensors, whatever its shards.

Opening reads headers only. Streaming maps one shard at a time per worker and yields one tensor at a time, so a load
never holds the model twice: the mapped pages belong to the page cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engram_runtime.errors import CheckpointError
from engram_runtime.loader.header import TensorInfo, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a model directory; every header was validated."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Read the headers of all shards. Raises CheckpointError naming what is missing or damaged."""
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: is not a directory (checkpoints are folders, nothing is downloaded)")
        placed: dict[str, TensorInfo] = {}
        indexed = None if (directory / SINGLE).is_file() else _read_index(directory)
        names = [SINGLE] if indexed is None else sorted(set(indexed.values()))
        for name in names:
            for key, info in read_header(directory / name).items():
                if key in placed:
                    raise CheckpointError(f"{directory}: {key} is in {placed[key].file.name} and again in {name}")
                placed[key] = info
        for key, name in (indexed or {}).items():
            if key not in placed or placed[key].file.name != name:
                raise CheckpointError(f"{directory / INDEX}: {key} is not in {name}")
        return cls(directory, placed)

    @property
    def files(self) -> tuple[Path, ...]:
        """The shards, by name."""
        return tuple(sorted({info.file for info in self.tensors.values()}))

    @property
    def bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.bytes for info in self.tensors.values())

    def stream(self, file: Path, keys: Sequence[str]) -> Iterator[tuple[TensorInfo, Tensor]]:
        """The named tensors of one shard, one at a time, mapped and not copied; valid until the next is asked for."""
        try:
            with safe_open(file, framework="pt", device="cpu") as shard:
                for key in keys:
                    yield self.tensors[key], shard.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _read_index(directory: Path) -> dict[str, str]:
    """Key -> shard name of a sharded checkpoint."""
    path = directory / INDEX
    if not path.is_file():
        hint = " (only safetensors checkpoints are read)" if any(directory.glob("*.bin")) else ""
        raise CheckpointError(f"{directory}: has neither {SINGLE} nor {INDEX}{hint}")
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: has no readable weight_map") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no readable weight_map")
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {key} is in {name!r}, which is no shard's file name")
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: the shard is missing")
    return weight_map
