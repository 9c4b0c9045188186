"""Logs as one JSON object a line, each with what it is about, and without anything that a reader should not see."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

_CONTEXT: ContextVar[dict[str, Any]] = ContextVar("engram_log_context", default={})  # noqa: B039 - never changed
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# What kopf adds to its records for its own handlers.
_HIDDEN = frozenset({"k8s_ref", "k8s_skip", "k8s_settings", "settings"})
_TRACE = 4000  # characters; the end says what happened


@contextlib.contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Every line logged inside carries these fields: controller, namespace, name, generation."""
    token = _CONTEXT.set({**_CONTEXT.get(), **fields})
    try:
        yield
    finally:
        _CONTEXT.reset(token)


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, then the context's fields and the call's `extra`. Text goes through `redact`."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__()
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._redact(record.getMessage()),
        }
        extra = {key: value for key, value in vars(record).items() if key not in _STANDARD | _HIDDEN}
        for key, value in {**_CONTEXT.get(), **extra}.items():
            line[key] = value if isinstance(value, int | float | bool | None) else self._redact(str(value))
        if record.exc_info and record.exc_info[0] is not None:
            trace = "".join(traceback.format_exception(*record.exc_info))
            line["trace"] = self._redact(trace[-_TRACE:])
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str, redact: Callable[[str], str], stream: TextIO = sys.stderr) -> None:
    """Make the root logger write JSON lines to `stream`. kopf's own chatter begins at warnings, or at `level` DEBUG."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(redact))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in ("kopf", "aiohttp", "asyncio", "kubernetes"):
        logging.getLogger(name).setLevel(level if level in ("DEBUG", "ERROR") else "WARNING")
