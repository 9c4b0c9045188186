"""The endpoints file: how clients on this machine find the models that `engram up` runs.

Several `engram up` may run at once, so the file is changed under a lock and replaced by rename. A reader never sees
half a file, and an entry whose process is gone is dropped by the next writer.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engram_operator.errors import ResourceError

VERSION = 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One ready replica."""

    name: str
    url: str
    admin_url: str


class EndpointsFile:
    """`$XDG_STATE_HOME/engram/endpoints.json`, mode 0600. Entries belong to the process that writes them."""

    def __init__(self, path: Path, pid: int | None = None) -> None:
        self._path = path
        self._pid = os.getpid() if pid is None else pid

    def publish(self, served_name: str, namespace: str, endpoints: Sequence[Endpoint]) -> None:
        """Set the model's ready replicas; none is an empty list: the model exists, and nobody can answer now."""
        with self._locked() as models:
            models[served_name] = {
                "namespace": namespace,
                "endpoints": [asdict(endpoint) for endpoint in endpoints],
                "pid": self._pid,
            }

    def withdraw(self, served_names: Sequence[str]) -> None:
        """Take our entries out."""
        with self._locked() as models:
            for name in served_names:
                if models.get(name, {}).get("pid") == self._pid:
                    del models[name]

    def refuse_taken(self, served_names: Sequence[str]) -> None:
        """ResourceError when another live process serves one of the names."""
        with self._locked() as models:
            problems = [
                f'the model name "{name}" is already served by another engram up (pid {models[name]["pid"]})'
                for name in served_names
                if name in models and models[name]["pid"] != self._pid
            ]
        if problems:
            raise ResourceError(problems)

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self._read()
            models = {name: entry for name, entry in before.items() if _alive(entry)}
            yield models
            if models != before or not self._path.exists():
                self._write(models)
        finally:
            os.close(lock)

    def _read(self) -> dict[str, Any]:
        """What is there; nothing when the file is missing or is not ours to understand."""
        try:
            document = json.loads(self._path.read_text())
            models = document["models"] if document["version"] == VERSION else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return models if isinstance(models, dict) else {}

    def _write(self, models: dict[str, Any]) -> None:
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"version": VERSION, "models": models}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)


def _alive(entry: Any) -> bool:
    try:
        os.kill(int(entry["pid"]), 0)
    except PermissionError:
        return True
    except (OSError, KeyError, TypeError, ValueError):
        return False
    return True
