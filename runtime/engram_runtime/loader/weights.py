"""Fills a model from a checkpoint, all of it or not at all.

Keys, shapes and dtypes are compared from the headers before anything is copied: a key that nobody consumes or a
parameter that nothing fills means that the model would run and be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from engram_runtime.errors import CheckpointError
from engram_runtime.loader.checkpoint import Checkpoint
from engram_runtime.loader.header import TensorInfo
from engram_runtime.loader.streaming import stream_weights

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each tensor, from one thread at a time."""

FLOATS = ("F32", "F16", "BF16", "F64")
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Target(Protocol):
    """See `engram_runtime.layers.weights.Target`."""

    @property
    def tensor(self) -> Tensor: ...

    @property
    def transform(self) -> Callable[[Tensor], Tensor] | None: ...

    def fill(self, source: Tensor) -> None: ...


def load_weights(
    checkpoint: Checkpoint,
    targets: Mapping[str, Target],
    *,
    ignorable: Sequence[str] = (),
    progress: Progress | None = None,
    workers: int = 1,
) -> None:
    """Copy every target's tensor from the checkpoint, converting dtype and device.

    ignorable: fnmatch patterns of keys that may be left over. workers: shards read at once. Tensors that a GPU takes as
    they are stored are streamed (see `streaming`).
    Raises CheckpointError naming keys that are missing, unexpected, of another shape, or not floating point.
    """
    check_coverage(checkpoint, targets, ignorable)
    total = sum(checkpoint.tensors[key].bytes for key in targets)
    lock = Lock()
    loaded = 0

    def count(nbytes: int) -> None:
        nonlocal loaded
        with lock:
            loaded += nbytes
            if progress is not None:
                progress(loaded, total)

    def load(file: Path, keys: list[str]) -> None:
        for info, tensor in checkpoint.stream(file, keys):
            _fill(targets[info.key], tensor, info)
            count(info.bytes)

    streamed = {key: target.tensor for key, target in targets.items() if _streams(target, checkpoint.tensors[key])}
    stream_weights([(checkpoint.tensors[key], tensor) for key, tensor in streamed.items()], count)
    shards: dict[Path, list[str]] = {}
    for key in targets.keys() - streamed.keys():
        shards.setdefault(checkpoint.tensors[key].file, []).append(key)
    if not shards:
        return
    with ThreadPoolExecutor(max_workers=max(1, min(workers, len(shards)))) as pool:
        for done in [pool.submit(load, file, keys) for file, keys in sorted(shards.items())]:
            done.result()


def check_coverage(checkpoint: Checkpoint, targets: Mapping[str, Target], ignorable: Sequence[str]) -> None:
    """Raise CheckpointError unless checkpoint and targets agree in keys, shapes and kind of dtype."""
    missing = [key for key in targets if key not in checkpoint.tensors]
    if missing:
        raise CheckpointError(f"{checkpoint.path}: the checkpoint lacks {_names(missing)}")
    extra = [key for key in checkpoint.tensors if key not in targets]
    ignored = [key for key in extra if any(fnmatchcase(key, pattern) for pattern in ignorable)]
    unexpected = sorted(set(extra) - set(ignored))
    if unexpected:
        raise CheckpointError(f"{checkpoint.path}: this architecture has no use for {_names(unexpected)}")
    if ignored:
        logger.info("%s: not needed and not read: %s", checkpoint.path, _names(sorted(ignored)))
    for key, target in targets.items():
        info = checkpoint.tensors[key]
        if info.shape != tuple(target.tensor.shape):
            raise CheckpointError(
                f"{info.file}: {key} has shape {list(info.shape)}, config.json implies {list(target.tensor.shape)}"
            )
        if info.dtype not in FLOATS:
            raise CheckpointError(f"{info.file}: {key} has dtype {info.dtype}: quantised weights are not supported")


def _streams(target: Target, info: TensorInfo) -> bool:
    tensor = target.tensor
    if tensor.device.type != "cuda" or STORED.get(info.dtype) != tensor.dtype:
        return False
    return target.transform is None and tensor.is_contiguous()


def _fill(target: Target, tensor: Tensor, info: TensorInfo) -> None:
    target.fill(tensor)
    # float16 ends at 65504, the other formats do not: an overflow would be silent until the first token.
    if target.tensor.dtype == torch.float16 and info.dtype != "F16" and not bool(target.tensor.isfinite().all()):
        raise CheckpointError(f"{info.file}: {info.key} has values that float16 cannot hold; load it as bfloat16")


def _names(keys: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(keys[:limit])
    return shown if len(keys) <= limit else f"{shown} and {len(keys) - limit} more"
