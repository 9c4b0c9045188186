"""Loads a checkpoint's tokenizer and collects every id that ends a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from engram_runtime.errors import CheckpointError


def load_tokenizer(path: Path | str) -> Any:
    """The `transformers` tokenizer of a model directory; offline, never with code from the checkpoint.

    Raises CheckpointError when the directory has none that can be read.
    """
    directory = Path(path)
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises what its many back ends raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{directory}: has no readable tokenizer: {reason[:300]}") from error


def eos_ids(path: Path | str, config: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids: the union of config.json, generation_config.json and the tokenizer's.

    They disagree in many published checkpoints (a chat model's turn end is often in only one of the three), and a
    missed one lets a model talk to itself. Raises CheckpointError for a generation_config.json that is no JSON.
    """
    found = {*_ids(getattr(config, "eos_token_id", None)), *_ids(getattr(tokenizer, "eos_token_id", None))}
    file = Path(path) / "generation_config.json"
    if file.is_file():
        try:
            raw = json.loads(file.read_text("utf-8"))
            found.update(_ids(raw.get("eos_token_id")))
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{file}: is not readable JSON") from error
    return frozenset(found)


def _ids(value: Any) -> list[int]:
    """None, one id or a list of ids -> a list; anything else in the list is dropped."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
