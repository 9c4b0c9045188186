"""What a checkpoint folder must hold before a server starts on it."""

from __future__ import annotations

import json
from pathlib import Path


def missing_files(folder: Path) -> list[str]:
    """What a Hugging Face checkpoint folder lacks; empty when nothing."""
    if not folder.is_dir():
        return ["there is no such folder"]
    problems = [
        f"{name} is missing" for name in ("config.json", "tokenizer_config.json") if not (folder / name).exists()
    ]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, OSError) as error:
            return [*problems, f"{index.name} cannot be read: {error}"]
        problems += [f"{name} is missing" for name in sorted(map(str, shards)) if not (folder / name).is_file()]
    elif not any(folder.glob("*.safetensors")):
        problems.append("there is no .safetensors file")
    return problems
