"""Reads config.json through transformers, which knows the old and the new spelling of every field.

Always offline and never with code from the checkpoint: a model directory is data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from engram_runtime.errors import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(path: Path | str) -> Any:
    """The `transformers` config of a model directory. Raises CheckpointError when it is missing or not understood."""
    directory = Path(path)
    file = directory / "config.json"
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is not a directory (checkpoints are folders, nothing is downloaded)")
    try:
        raw = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{file}: model_type is missing")
    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        raise CheckpointError(f"{file}: model_type {raw['model_type']!r} is unknown to transformers")
    try:
        return transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates with exceptions of several libraries
        raise CheckpointError(f"{file}: {_first_line(error)}") from error


def resolve_dtype(config: Any, device: torch.device | str, dtype: str | torch.dtype = "auto") -> torch.dtype:
    """The dtype to run in. "auto": the checkpoint's on a GPU, float32 on the CPU. ValueError for unknown names."""
    if dtype == "auto":
        if torch.device(device).type == "cpu":
            return torch.float32
        stored = getattr(config, "dtype", None) or torch.float32
        dtype = stored if isinstance(stored, torch.dtype) else str(stored)
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def check_architecture(config: Any, directory: Path) -> None:
    """Raise CheckpointError unless the checkpoint holds a causal language model (and not, say, a classifier)."""
    names = getattr(config, "architectures", None) or ()
    if names and not any(name.endswith("ForCausalLM") for name in names):
        raise CheckpointError(f"{directory / 'config.json'}: architectures must name a ...ForCausalLM, got {names}")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else type(error).__name__
