"""Reads the JSON tables: {"op": {"key=value,key=value": {parameter: number, ...}, "*": {...}}}.

An entry is found by its full key, then by "*"; a table for a GPU may leave ops or keys out, the default table then
answers. Values are integers or strings; the meaning of each parameter is in the docstring of its kernel. Names that a
kernel does not know (the times that were measured) are passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Mapping
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

Config = dict[str, Any]
T = TypeVar("T")

logger = logging.getLogger(__name__)


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


def file_name(gpu: str, triton: str) -> str:
    """Of a table tuned on this machine: launch parameters are no better than the compiler they were timed with."""
    return f"{table_name(gpu)}-triton-{triton}.json"


def read_local(path: Path, about: Mapping[str, str]) -> dict[str, dict[str, Config]]:
    """A table that `engram autotune` wrote; empty when there is none for this GPU and Triton, or a damaged one."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        told = table.pop("about")
        if any(told[name] != about[name] for name in ("gpu", "triton")):
            raise ValueError(f"it is for {told['gpu']} and Triton {told['triton']}")
        if not all(isinstance(entries, dict) for entries in table.values()):
            raise ValueError("it does not map ops to entries")
        if not all(isinstance(entry, dict) for entries in table.values() for entry in entries.values()):
            raise ValueError("it does not map keys to parameters")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s: not used: %s", path, error)
        return {}
    found: dict[str, dict[str, Config]] = table
    return found


def use_folder(folder: Path | None) -> None:
    """Look for tables of this machine's own here first, from now on. Before the first kernel runs: choices are kept."""
    _FOLDER[:] = [] if folder is None else [folder]
    _tables.cache_clear()
    _lookup.cache_clear()


_FOLDER: list[Path] = []
# Kernels ask by shape, from anywhere, without a context that could carry a folder; so the process has one.


@functools.cache
def _tables() -> tuple[dict[str, dict[str, Config]], ...]:
    if not torch.cuda.is_available():
        return (load_table("default"),)
    gpu, triton = torch.cuda.get_device_name(), version("triton")
    table = {op: dict(entries) for op, entries in load_table(table_name(gpu)).items()}
    for folder in _FOLDER:
        own = read_local(folder / file_name(gpu, triton), {"gpu": gpu, "triton": triton})
        for op, entries in own.items():
            table.setdefault(op, {}).update(entries)
    return table, load_table("default")


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


def parameters(kind: type[T], entry: Mapping[str, Any], what: str) -> T:
    """An entry as `kind`, a dataclass of whole numbers and booleans. ValueError, which begins with `what`, for one that
    lacks a field or has something else there."""
    values: dict[str, int | bool] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = entry.get(field.name)
        if not isinstance(value, int):
            raise ValueError(f"{what}: {field.name} must be a whole number, got {value!r}")
        values[field.name] = bool(value) if field.type in (bool, "bool") else value
    return kind(**values)
