"""The API server's audit log: who used which right, and what was written while nothing happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CREATED, FORBIDDEN = 201, 403
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished request. `resource` is as in a role: "pods/status"; `group` "" is the core group."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    status: int
    time: str
    allowed: bool

    @property
    def writes(self) -> bool:
        return self.verb in WRITES


class AuditLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def position(self) -> int:
        """Of the end, for `entries(since=...)`."""
        return self.path.stat().st_size

    def entries(self, since: int = 0, user: str | None = None) -> Iterator[Entry]:
        """Requests for resources that ended after `since`, by one user when named. A watch counts when it begins."""
        with self.path.open("rb") as file:
            file.seek(since)
            for line in file:
                if not line.endswith(b"\n"):  # being written
                    return
                event = json.loads(line)
                about = event.get("objectRef")
                if about is None or not _counts(event):
                    continue
                entry = _entry(event, about)
                if user is None or entry.user == user:
                    yield entry

    def writes(self, since: int, user: str | None = None) -> list[Entry]:
        """Leases left out: their renewal is how a component says that it lives."""
        found = self.entries(since, user)
        return [entry for entry in found if entry.writes and entry.resource != "leases" and entry.status < 400]

    def used(self, user: str) -> set[tuple[str, str, str]]:
        """(group, resource, verb) of everything that a user was allowed and asked for.

        A server-side apply that makes an object needs the right to create it too, and is logged as a patch.
        """
        found = {
            (entry.group, entry.resource, entry.verb, entry.status)
            for entry in self.entries(user=user)
            if entry.allowed
        }
        used = {(group, resource, verb) for group, resource, verb, _ in found}
        return used | {(group, resource, "create") for group, resource, _, status in found if status == CREATED}

    def refused(self, user: str) -> list[Entry]:
        """What the authoriser refused a user; not what an API server in its first seconds had no time for (429)."""
        return [entry for entry in self.entries(user=user) if not entry.allowed and entry.status == FORBIDDEN]


def service_account(namespace: str, name: str) -> str:
    return f"system:serviceaccount:{namespace}:{name}"


def _counts(event: dict[str, object]) -> bool:
    """Each request once: a watch when its answer starts, since its end may be long after the test."""
    return event["stage"] == ("ResponseStarted" if event["verb"] == "watch" else "ResponseComplete") or (
        event["stage"] == "ResponseComplete" and event["verb"] == "watch" and _code(event) >= 400
    )


def _code(event: dict[str, object]) -> int:
    status = event.get("responseStatus")
    return int(status.get("code", 0)) if isinstance(status, dict) else 0


def _entry(event: dict[str, object], about: dict[str, str]) -> Entry:
    subresource = f"/{about['subresource']}" if about.get("subresource") else ""
    user, annotations = event["user"], event.get("annotations")
    decision = annotations.get("authorization.k8s.io/decision") if isinstance(annotations, dict) else None
    return Entry(
        user=str(user["username"]) if isinstance(user, dict) else "",
        verb=str(event["verb"]),
        group=about.get("apiGroup", ""),
        resource=f"{about.get('resource', '')}{subresource}",
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        status=_code(event),
        time=str(event.get("stageTimestamp", "")),
        allowed=decision == "allow",
    )
