"""What happens, one line per event: for a person on stderr, or as JSON lines on stdout for a program."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TextIO

Phase = Literal[
    "Notice", "Pending", "Initializing", "Starting", "Ready", "NotReady", "BackOff", "Terminating", "Stopped"
]


@dataclass(frozen=True, slots=True)
class Event:
    """`subject` is namespace/pod, or namespace/model. `details` are machine-readable extras (pid, url, log)."""

    subject: str
    phase: Phase
    reason: str
    message: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class EventSink(Protocol):
    def __call__(self, event: Event) -> None: ...


class Reporter:
    """Writes events to a stream."""

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        self._stream = stream
        self._as_json = as_json

    def __call__(self, event: Event) -> None:
        if self._as_json:
            entry = {
                "time": round(time.time(), 3),
                "subject": event.subject,
                "phase": event.phase,
                "reason": event.reason,
                "message": event.message,
                **event.details,
            }
            line = json.dumps(entry)
        else:
            clock = time.strftime("%H:%M:%S")
            text = f"{event.reason}: {event.message}" if event.message else event.reason
            line = f"{clock}  {event.subject:<24} {event.phase:<12} {text}"
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more; the engines go on
            print(line, file=self._stream, flush=True)
