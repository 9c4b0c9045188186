"""Which class serves which `model_type`. A new architecture is one file and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from engram_runtime.errors import CheckpointError
from engram_runtime.models.base import CausalLM

MODELS: Mapping[str, str] = {
    "granitemoehybrid": "engram_runtime.models.granitemoehybrid:GraniteMoeHybrid",
    "llama": "engram_runtime.models.llama:Llama",
    "qwen2": "engram_runtime.models.qwen2:Qwen2",
    "qwen3": "engram_runtime.models.qwen3:Qwen3",
}


def model_class(model_type: str) -> type[CausalLM]:
    """The class for a config's `model_type`. Raises CheckpointError listing the known ones."""
    target = MODELS.get(model_type)
    if target is None:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not supported; supported: {', '.join(sorted(MODELS))}"
        )
    module, _, name = target.partition(":")
    found: type[CausalLM] = getattr(importlib.import_module(module), name)
    return found
