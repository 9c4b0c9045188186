"""Events for what a person wants to be told of: changes between one status and the next, never one per look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Reasons that pass by themselves, or that whoever acts on them tells of: a status has them, nobody needs to be called.
QUIET = frozenset(
    {
        "NoReadyReplicas", "NoPods", "Loading", "Waiting", "WaitingForScheduler", "Downloading", "Checking",
        "Terminating", "Suspended", "Deleting", "Unknown", "NotReady", "NodeLost",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Announcement:
    type: str
    reason: str
    message: str


def announcements(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Announcement]:
    """From two statuses of a model."""
    before, after = _by_type(old), _by_type(new)
    was, now = before.get("Ready", {}), after["Ready"]
    if now["status"] == "True" and was.get("status") != "True":
        yield Announcement("Normal", "Ready", now["message"])
    elif now["status"] != "True" and now["reason"] not in QUIET and _changed(was, now):
        yield Announcement("Warning", now["reason"], now["message"])
    elif now["status"] != "True" and was.get("status") == "True" and now["reason"] not in ("Suspended", "Deleting"):
        yield Announcement("Warning", "NotReady", now["message"])
    for name, kind in (("UpToDate", "Normal"), ("SnapshotsReady", "Warning")):
        was, now = before.get(name, {}), after[name]
        if now["status"] == "False" and _changed(was, now):
            yield Announcement(kind, now["reason"], now["message"])
    was, now = before.get("Progressing", {}), after["Progressing"]
    if now["reason"] == "ProgressDeadlineExceeded" and _changed(was, now):
        yield Announcement("Warning", now["reason"], now["message"])


def _changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return (was.get("status"), was.get("reason")) != (now["status"], now["reason"])


def _by_type(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {entry["type"]: entry for entry in status.get("conditions") or ()}
