"""Reads the JSON tables: {"op": {"key=value,key=value": {parameter: number, ...}, "*": {...}}}.

An entry is found by its full key, then by "*"; a table for a GPU may leave ops or keys out, the default table then
answers. Values are integers or strings; the meaning of each parameter is in the docstring of its kernel.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch

Config = dict[str, Any]


@functools.cache
def load_table(name: str) -> dict[str, dict[str, Config]]:
    """The table of this name as plain data; empty when none ships. Raises ValueError for a malformed one."""
    file = resources.files("engram_kernels.tuning").joinpath(f"{name}.json")
    if not file.is_file():
        return {}
    table = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(table, dict) or not all(isinstance(entries, dict) for entries in table.values()):
        raise ValueError(f"tuning table {name}.json must map ops to entries")
    return {op: entries for op, entries in table.items() if op != "about"}


def table_name(gpu: str) -> str:
    """File name, without suffix, of a GPU's table: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


@functools.cache
def _tables() -> tuple[dict[str, dict[str, Config]], ...]:
    if torch.cuda.is_available():
        return load_table(table_name(torch.cuda.get_device_name())), load_table("default")
    return (load_table("default"),)


@functools.cache
def _lookup(op: str, key: str) -> Config:
    for table in _tables():
        entries = table.get(op, {})
        if found := entries.get(key) or entries.get("*"):
            return found
    raise ValueError(f"no tuning entry for op {op!r}, key {key!r}")


def tuned_or_none(op: str, key: str) -> Config | None:
    """The entry of exactly this key in this GPU's table (not the default table's), or None: the caller has rules."""
    return _tables()[0].get(op, {}).get(key)


def tuned(op: str, shape: Mapping[str, int | str]) -> Config:
    """Launch parameters of an op for a shape described in a few words. Raises ValueError when no table has the op."""
    return _lookup(op, ",".join(f"{name}={value}" for name, value in shape.items()))
