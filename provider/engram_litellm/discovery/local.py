"""The local mode's list of endpoints: a file that `engram up` writes, so a laptop needs no configuration.

{"version": 1, "models": {"<served name>": {"namespace": "default",
   "endpoints": [{"name": "<pod>", "url": "http://127.0.0.1:30000", "admin_url": ...}], "pid": 123}}}
"""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import Any

from engram_litellm.discovery.endpoints import Endpoint, EndpointSet, split_model

logger = logging.getLogger("engram_litellm")
VERSION = 1


class LocalFile:
    """Reads the file again only when it changed. A file that cannot be read keeps the last good list."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._models: dict[str, Any] = {}

    def find(self, model: str, *, wait: bool = True) -> EndpointSet | None:
        """The replicas `engram up` started; a file read is short enough not to count as blocking."""
        models = self._read()
        namespace, name = split_model(model)
        for served, wanted in ((model, None), (name, namespace)):
            entry = models.get(served)
            if entry is not None and wanted in (None, entry.get("namespace", "default")):
                endpoints = tuple(Endpoint(item["name"], item["url"]) for item in entry["endpoints"])
                return EndpointSet(served, endpoints, f"local mode ({self._path})") if endpoints else None
        return None

    def close(self) -> None:
        """Nothing runs in the background."""

    def _read(self) -> dict[str, Any]:
        with self._lock:
            try:
                status = os.stat(self._path)
            except OSError:
                self._stamp, self._models = None, {}
                return self._models
            if status.st_uid not in (os.getuid(), 0):  # whoever writes this file reads every conversation
                return {}
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                try:
                    with open(self._path, encoding="utf-8") as file:
                        self._models = _validated(json.load(file))
                    self._stamp = stamp
                except (OSError, ValueError) as error:
                    logger.warning("%s cannot be used: %s", self._path, error)
            return self._models


def _validated(data: Any) -> dict[str, Any]:
    """The `models` table; ValueError says what is wrong."""
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}")
    models = data.get("models")
    if not isinstance(models, dict):
        raise ValueError("models must be an object")
    for name, entry in models.items():
        endpoints = entry.get("endpoints") if isinstance(entry, dict) else None
        if not isinstance(endpoints, list):
            raise ValueError(f"models.{name}.endpoints must be a list")
        for item in endpoints:
            if not isinstance(item, dict) or not all(isinstance(item.get(field), str) for field in ("name", "url")):
                raise ValueError(f"models.{name}.endpoints must hold a name and a url each")
    return models
