"""The whole status of a model: conditions, phase, counts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from engram_operator.builders.settings import ENGINE, HTTP_PORT, MODEL_INIT
from engram_operator.status import conditions as of
from engram_operator.status.conditions import Condition
from engram_operator.status.observed import Observed, Refusal
from engram_operator.status.pods import Object, container_status, is_ready, worst
from engram_operator.status.redact import redact

_REVISION = re.compile(r"\brevision\W{1,4}([0-9a-f]{40})\b")  # as `engram fetch` ends
STAMP = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class StatusResult:
    """`look_again`: seconds after which the status changes by time alone; None when it does not."""

    status: dict[str, Any]
    look_again: float | None

    def condition(self, name: str) -> Mapping[str, Any]:
        return next(entry for entry in self.status["conditions"] if entry["type"] == name)


def status_of(seen: Observed, now: datetime) -> StatusResult:
    """The same observation gives the same status; only a passed deadline makes it depend on `now`."""
    generation = int(seen.model["metadata"].get("generation") or 0)
    progressing, look_again = of.progressing(seen, now)
    found = [
        of.accepted(seen),
        of.model_cached(seen),
        of.scheduled(seen),
        of.available(seen),
        progressing,
        of.snapshots_ready(seen),
        of.up_to_date(seen),
    ]
    found.append(of.ready(found))
    stamp = now.astimezone(UTC).strftime(STAMP)
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "phase": phase(seen, {entry.type: entry for entry in found}),
        **_counts(seen),
        "selector": f"app.kubernetes.io/instance={seen.name},app.kubernetes.io/name=engram-engine",
        "url": f"http://{seen.name}.{seen.namespace}.svc:{HTTP_PORT}",
        "model": _model(seen),
    }
    optional = {"image": _image(seen), "snapshots": _snapshots(seen)}
    status |= {name: value for name, value in optional.items() if value}
    status["conditions"] = of.merged(found, seen.status.get("conditions") or (), generation, stamp)
    return StatusResult(status, look_again)


def same_status(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether writing `new` over `old` would change anything."""
    return dict(old) == dict(new)


def ready_pods(pods: Iterable[Object]) -> list[Object]:
    return [pod for pod in pods if is_ready(pod)]


def phase(seen: Observed, by_type: Mapping[str, Condition]) -> str:
    """One word for people. Conditions are for programs."""
    if seen.mode == "Deleting":
        return "Draining"
    if seen.mode in ("Suspended", "Asleep"):
        if seen.pods:
            return "Draining"
        return "Suspended" if seen.mode == "Suspended" else "Idle"
    ready = len(seen.ready())
    if not by_type["Accepted"].ok:
        return "Degraded" if ready else "Failed"
    progress = by_type["Progressing"]
    trouble = worst(seen.troubles())
    broken = trouble is not None and not trouble.passing
    if ready:
        if ready >= seen.wanted and of.is_rolled_out(seen):
            return "Ready"
        if broken or not progress.ok:
            return "Degraded"
        return "Updating"
    if by_type["Scheduled"].status != "True":
        return "Pending" if progress.ok else "Failed"
    if broken or not progress.ok:
        return "Failed"
    cached = by_type["ModelCached"]
    if cached.reason in ("Downloading", "Checking"):
        return "Downloading"
    return "Loading" if cached.ok else "Pending"


def _counts(seen: Observed) -> dict[str, Any]:
    status = (seen.stateful_set or {}).get("status") or {}
    counts: dict[str, Any] = {
        "replicas": len(seen.pods),
        "desiredReplicas": seen.wanted,
        "readyReplicas": len(seen.ready()),
        "updatedReplicas": len(of.updated_pods(seen)),
    }
    for field in ("currentRevision", "updateRevision"):
        if status.get(field):
            counts[field] = status[field]
    return counts


def _image(seen: Observed) -> str:
    """What the pods are made with, after podTemplate."""
    spec = (seen.stateful_set or {}).get("spec") or {}
    containers = ((spec.get("template") or {}).get("spec") or {}).get("containers") or ()
    return next((str(entry["image"]) for entry in containers if entry.get("name") == ENGINE), "")


def _model(seen: Observed) -> dict[str, Any]:
    """What the engines say, and what they said before while none answers."""
    before = seen.status.get("model") or {}
    found: dict[str, Any] = {"name": seen.served_name}
    reports = [report for _, report in sorted(seen.engines.items())]
    report = reports[0] if reports else None
    said = {
        "digest": report and report.model_digest,
        "architecture": report and report.architecture,
        "weightBytes": report and report.weight_bytes,
        "stateBytes": report and report.state_bytes,
        "stateABI": report and report.state_abi,
        "resolvedRevision": _resolved(seen),
    }
    for name, value in said.items():
        value = before.get(name) if value is None else value
        if value is not None:
            found[name] = value
    return found


def _resolved(seen: Observed) -> str | None:
    """The commit that the newest download says it has."""
    for pod in seen.by_ordinal():
        ended = (container_status(pod, MODEL_INIT).get("state") or {}).get("terminated")
        if ended is not None and (found := _REVISION.search(str(ended.get("message") or ""))) is not None:
            return found[1]
    return None


def _snapshots(seen: Observed) -> dict[str, Any]:
    """Replicas with a policy share one store, so each counts all of it; tiers of their own add up."""
    if seen.snapshots == "Disabled":
        return {}
    counts = [report.snapshots for _, report in sorted(seen.engines.items()) if report.snapshots is not None]
    if not counts:
        return dict(seen.status.get("snapshots") or {})
    total = max if seen.snapshots == "Store" else sum
    found: dict[str, Any] = {}
    for name, values in (("count", [c.count for c in counts]), ("totalBytes", [c.total_bytes for c in counts])):
        if known := [value for value in values if value is not None]:
            found[name] = total(known)
    succeeded = [c.last_success_time for c in counts if c.last_success_time is not None]
    failed = [(c.last_failure_time, c.last_error or "") for c in counts if c.last_failure_time is not None]
    if succeeded:
        found["lastSuccessTime"] = _stamp(max(succeeded))
    if failed:
        when, error = max(failed)
        found["lastFailureTime"] = _stamp(when)
        if error:
            found["lastError"] = redact(error)
    return found


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime(STAMP)


__all__ = ["Observed", "Refusal", "StatusResult", "phase", "ready_pods", "same_status", "status_of"]
