"""From a model directory to a model that runs: config, class, weights."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engram_kernels import Ops
from engram_runtime.layers.weights import Build
from engram_runtime.loader.checkpoint import Checkpoint
from engram_runtime.loader.config import check_architecture, load_config, resolve_dtype
from engram_runtime.loader.weights import Progress, load_weights
from engram_runtime.models.base import CausalLM
from engram_runtime.models.registry import model_class


def load_model(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: str | torch.dtype = "auto",
    ops: Ops | None = None,
    progress: Progress | None = None,
    max_positions: int | None = None,
    state_dtype: str = "float32",
) -> CausalLM:
    """Build the model of a directory and fill it from its safetensors files.

    dtype: "auto" (the checkpoint's on a GPU, float32 on the CPU) or a name. ops: must be bound for the same device and
    dtype; default: `Ops.bind` with no overrides. max_positions: rows of the rotary table, when the engine serves a
    shorter window than the model allows. state_dtype: what recurrent (ssm) states are kept in, "float32" or "bfloat16".
    Raises CheckpointError naming the field, the key or the file that cannot be honoured or read, and ValueError when
    the model has no state to keep in another dtype.
    """
    directory = Path(path)
    config = load_config(directory)
    check_architecture(config, directory)
    family = model_class(config.model_type)
    place = torch.device(device)
    resolved = resolve_dtype(config, place, dtype)
    checkpoint = Checkpoint.open(directory)
    build = Build(ops or Ops.bind(place, resolved), place, resolved)
    model = family(config, build, max_positions=max_positions, state_dtype=state_dtype).eval()
    load_weights(
        checkpoint,
        model.targets(),
        ignorable=model.ignored_keys(),
        progress=progress,
        workers=min(4, os.cpu_count() or 1),
    )
    return model
