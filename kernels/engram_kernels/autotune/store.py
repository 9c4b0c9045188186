"""What a search found, as a tuning table in a folder: one file per GPU and Triton version, written whole or not.

Several searches may add to one table: each adds what it found to what is there, one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engram_kernels.tuning.tables import file_name, read_local

LOCK = ".lock"


def known(folder: Path, about: Mapping[str, str]) -> dict[str, dict[str, dict[str, Any]]]:
    """The table of `about`'s GPU and Triton version; empty when there is none that can be used."""
    return read_local(folder / file_name(about["gpu"], about["triton"]), about)


def merge(folder: Path, about: Mapping[str, str], entries: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Path:
    """Add entries {op: {key: parameters}} to the table of `about`'s GPU and Triton version; newer ones win.

    Raises OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(about["gpu"], about["triton"])
    with _locked(folder / LOCK):
        table: dict[str, dict[str, Any]] = {op: dict(found) for op, found in read_local(path, about).items()}
        for op, found in entries.items():
            table.setdefault(op, {}).update({key: dict(entry) for key, entry in found.items()})
        _write(path, text(about, {op: dict(sorted(table[op].items())) for op in sorted(table)}))
    return path


def text(about: Mapping[str, str], table: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a line for each entry, in the given order: so are those that ship, and what is added shows alone."""

    def lines(entries: Mapping[str, Any]) -> str:
        return ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())

    ops = (f" {json.dumps(op)}: {{\n{lines(entries)}\n }}" for op, entries in table.items())
    return "{\n" + ",\n".join([f' "about": {json.dumps(dict(about))}', *ops]) + "\n}\n"


def _write(path: Path, content: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash may leave the new name with nothing in it
            os.chmod(file.name, 0o644)  # servers may run as another user than the one who tunes
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Between processes; the kernel lets go when the holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
