"""What a search found, as a tuning table in a folder: one file per GPU and Triton version, written whole or not."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engram_kernels.tuning.tables import file_name, read_local


def merge(folder: Path, about: Mapping[str, str], entries: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Path:
    """Add entries {op: {key: parameters}} to the table of `about`'s GPU and Triton version; newer ones win.

    Raises OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(about["gpu"], about["triton"])
    table: dict[str, dict[str, Any]] = {op: dict(known) for op, known in read_local(path, about).items()}
    for op, found in entries.items():
        table.setdefault(op, {}).update({key: dict(entry) for key, entry in found.items()})
    document = {"about": dict(about), **{op: dict(sorted(table[op].items())) for op in sorted(table)}}
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.replace(file.name, path)
    return path
