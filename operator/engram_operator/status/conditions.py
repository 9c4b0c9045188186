"""Each condition of a model from what was observed. True is good, everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from engram_operator.builders.settings import MODEL_INIT
from engram_operator.status.observed import Observed
from engram_operator.status.pods import (
    Object,
    Stage,
    Trouble,
    container_status,
    is_terminating,
    last_progress,
    parse_time,
    worst,
)
from engram_operator.status.redact import redact

MESSAGE_LIMIT = 4000


@dataclass(frozen=True, slots=True)
class Condition:
    """`status` is "True", "False" or "Unknown"."""

    type: str
    status: str
    reason: str
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "True"


def accepted(seen: Observed) -> Condition:
    if seen.refused is not None:
        return Condition("Accepted", "False", seen.refused.reason, redact(seen.refused.message, MESSAGE_LIMIT))
    # A Secret that went missing while replicas serve is their trouble, not the resource's.
    if not seen.ready() and (trouble := _of(seen, "Accepted")) is not None:
        return Condition("Accepted", "False", trouble.reason, trouble.message)
    return Condition("Accepted", "True", "Accepted", seen.notice)


def scheduled(seen: Observed) -> Condition:
    if seen.wanted == 0:
        return Condition("Scheduled", "True", "NotNeeded", "no pods are wanted now")
    if (trouble := _of(seen, "Scheduled")) is not None:
        return Condition("Scheduled", "False", trouble.reason, trouble.message)
    pods = [pod for pod in seen.pods if not is_terminating(pod)]
    if len(pods) < seen.wanted:
        notes = seen.warnings.get(("StatefulSet", seen.name), ())
        if notes and seen.stateful_set is not None:
            return Condition("Scheduled", "False", _refused_pod(notes[-1]), redact(notes[-1]))
        if not pods:
            why = "the pods are being made" if seen.stateful_set is not None else "there is no StatefulSet"
            return Condition("Scheduled", "Unknown", "NoPods", why)
    if any(not (pod.get("spec") or {}).get("nodeName") for pod in pods):
        return Condition("Scheduled", "Unknown", "WaitingForScheduler", "the scheduler has not said anything yet")
    return Condition("Scheduled", "True", "Scheduled")


def _refused_pod(note: str) -> str:
    """Why the API server took no pod from the StatefulSet controller."""
    lowered = note.lower()
    if "exceeded quota" in lowered or "failed quota" in lowered or "insufficient quota" in lowered:
        return "QuotaExceeded"
    if "serviceaccount" in lowered and "not found" in lowered:
        return "ServiceAccountNotFound"
    return "PodsRefused"


def model_cached(seen: Observed) -> Condition:
    kind = "ModelCached"
    if (trouble := _of(seen, "ModelCached")) is not None:
        return Condition(kind, "False", trouble.reason, trouble.message)
    checked_only = not seen.source.startswith(("hf://", "s3://"))
    pods = [pod for pod in seen.by_ordinal() if not is_terminating(pod)]
    done, running, words = [], [], ""
    for pod in pods:
        state = container_status(pod, MODEL_INIT).get("state") or {}
        ended = state.get("terminated")
        if ended is not None and ended.get("exitCode") == 0:
            done.append(pod)
            words = words or redact(str(ended.get("message") or ""))
        elif state.get("running") is not None:
            running.append((pod["metadata"]["name"], state["running"].get("startedAt")))
    if running:
        what = "checks" if checked_only else "downloads"
        names = ", ".join(name for name, _ in running[:3]) + (" and others" if len(running) > 3 else "")
        started = min((str(at) for _, at in running if at), default="")
        since = f" since {started}" if started else ""
        reason = "Checking" if checked_only else "Downloading"
        return Condition(kind, "False", reason, f"{names} {what} {redact(seen.source)}{since}")
    if pods and len(done) == len(pods):
        return Condition(kind, "True", "NotNeeded" if checked_only else "Cached", words)
    before = _before(seen, kind)
    if not pods and before.get("status") == "True":  # no pod needs it now; nobody took the cache away
        return Condition(kind, "True", str(before["reason"]), str(before["message"]))
    return Condition(kind, "Unknown", "NoPods" if not pods else "Waiting", "no pod has come to its weights yet")


def available(seen: Observed) -> Condition:
    kind, ready, wanted = "Available", len(seen.ready()), seen.wanted
    if seen.mode == "Deleting":
        return Condition(kind, "False", "Deleting", f"{len(seen.pods)} pods are left to end")
    if seen.mode == "Suspended":
        spec = seen.model.get("spec") or {}
        why = "spec.suspend is true" if spec.get("suspend") else "spec.replicas is 0"
        return Condition(kind, "False", "Suspended", why)
    if seen.mode == "Asleep":
        return Condition(kind, "True", "Idle", "asleep after idleSeconds without a request; the next request wakes it")
    trouble = worst(seen.troubles())
    if ready:
        message = f"{ready} of {wanted} replicas are ready"
        if trouble is not None and ready < wanted:
            message += f"; {trouble.message}"
        return Condition(kind, "True", "MinimumReplicasAvailable", message)
    if trouble is None:
        return Condition(kind, "False", "NoReadyReplicas", f"0 of {wanted} replicas are ready")
    reason = trouble.reason if trouble.stage == "Available" and not trouble.passing else "NoReadyReplicas"
    return Condition(kind, "False", reason, trouble.message)


def progressing(seen: Observed, now: datetime) -> tuple[Condition, float | None]:
    """The condition, and the seconds until the deadline passes when nothing moves; None when nothing is awaited."""
    kind = "Progressing"
    if seen.mode == "Suspended":
        return Condition(kind, "False", "Paused", "suspended: no pods are wanted"), None
    if seen.mode == "Deleting":
        return Condition(kind, "True", "Draining", "pods end, then the model goes"), None
    if seen.stateful_set is None:
        if seen.refused is not None:
            return Condition(kind, "False", "NotAccepted", "nothing is rolled out until the spec is accepted"), None
        return Condition(kind, "True", "Creating", "the StatefulSet is being made"), None
    if seen.mode == "Asleep" and not seen.pods:
        return Condition(kind, "True", "Idle", "asleep"), None
    updated, present = updated_pods(seen), [pod for pod in seen.pods if not is_terminating(pod)]
    ready = len(seen.ready())
    if is_rolled_out(seen):
        return Condition(
            kind, "True", "RolloutComplete", f"{ready} of {seen.wanted} replicas run the wanted version"
        ), None
    times = [time for pod in present for time in last_progress(pod)]
    times += [time for time in (seen.since, parse_time(seen.stateful_set["metadata"].get("creationTimestamp"))) if time]
    deadline = max(times, default=now) + timedelta(seconds=seen.deadline_seconds)
    state = f"{ready} of {seen.wanted} replicas are ready, {len(updated)} run the wanted version"
    if now >= deadline:
        trouble = worst(seen.troubles())
        stuck = f"nothing has moved for {seen.deadline_seconds} s: {state}" + (
            f"; {trouble.message}" if trouble else ""
        )
        return Condition(kind, "False", "ProgressDeadlineExceeded", stuck), None
    if len(updated) < len(present) or len(seen.pods) > seen.wanted:
        reason = "RolloutInProgress" if len(updated) < len(present) else "ScalingDown"
    else:
        reason = "ScalingUp"
    return Condition(kind, "True", reason, state), (deadline - now).total_seconds()


def updated_pods(seen: Observed) -> list[Object]:
    """Pods of the StatefulSet's newest revision that are not on their way out.

    Until its controller has seen a changed template, its status names the revision before: the pods that were there
    when the template changed are none of the newest then.
    """
    revision = ((seen.stateful_set or {}).get("status") or {}).get("updateRevision")
    label = "controller-revision-hash"
    since = None if _caught_up(seen) else seen.since
    return [
        pod
        for pod in seen.by_ordinal()
        if not is_terminating(pod)
        and revision
        and (pod["metadata"].get("labels") or {}).get(label) == revision
        and not (since and (made := parse_time(pod["metadata"].get("creationTimestamp"))) and made < since)
    ]


def _caught_up(seen: Observed) -> bool:
    """Whether the StatefulSet's status is about what it now says."""
    metadata, status = (seen.stateful_set or {}).get("metadata") or {}, (seen.stateful_set or {}).get("status") or {}
    return int(status.get("observedGeneration") or 0) >= int(metadata.get("generation") or 0)


def is_rolled_out(seen: Observed) -> bool:
    """Every wanted pod is of the newest revision and ready, and there is no other."""
    if seen.stateful_set is None:
        return False
    updated = updated_pods(seen)
    names = {pod["metadata"]["name"] for pod in updated}
    ready = [pod for pod in seen.ready() if pod["metadata"]["name"] in names]
    return _caught_up(seen) and len(seen.pods) == len(updated) == len(ready) == seen.wanted


def snapshots_ready(seen: Observed) -> Condition:
    kind = "SnapshotsReady"
    if seen.snapshots == "Disabled":
        return Condition(kind, "True", "Disabled", "spec.snapshots.enabled is false")
    if seen.snapshots == "LocalOnly":
        text = "no SnapshotPolicy: snapshots stay in each replica's memory and disk, and go with them"
        return Condition(kind, "True", "LocalOnly", text)
    if seen.refused is not None and seen.refused.reason in ("PolicyNotFound", "InvalidPolicy", "StoreNotUsable"):
        return Condition(kind, "False", seen.refused.reason, redact(seen.refused.message))
    stores = [(pod, report.store) for pod, report in sorted(seen.engines.items()) if report.store is not None]
    for pod, store in stores:
        if not store.reachable:
            return Condition(kind, "False", store.reason or "StoreUnavailable", f"{pod}: {redact(store.message)}")
    if stores:
        return Condition(kind, "True", "StoreReachable")
    before = _before(seen, kind)
    if seen.wanted == 0 and before.get("reason") not in (None, "Disabled", "LocalOnly"):
        return Condition(kind, str(before["status"]), str(before["reason"]), str(before["message"]))
    return Condition(kind, "Unknown", "NoReport", "no engine has reported on its store yet")


def up_to_date(seen: Observed) -> Condition:
    before = _before(seen, "UpToDate")
    if seen.refused is not None and before:  # nothing was rendered to compare with
        return Condition("UpToDate", str(before["status"]), str(before["reason"]), str(before["message"]))
    if seen.pending is not None:
        return Condition("UpToDate", "False", "OperatorUpgradePending", seen.pending)
    held: dict[str, str] = {}  # one pod for each set of weights
    for pod in updated_pods(seen):
        name = str(pod["metadata"]["name"])
        report = seen.engines.get(name)
        if report is not None and report.model_digest:
            held.setdefault(report.model_digest, name)
    if len(held) > 1:
        pods = ", ".join(f"{name} {digest[:12]}" for digest, name in held.items())
        message = f"replicas of one version hold different weights ({pods}): the source moved; set spec.model.revision"
        return Condition("UpToDate", "False", "WeightsDiffer", message)
    return Condition("UpToDate", "True", "UpToDate")


def ready(conditions: Iterable[Condition]) -> Condition:
    """Accepted and Available; with the first of the gates and what leads to them that is not True."""
    by_type: Mapping[str, Condition] = {entry.type: entry for entry in conditions}
    if by_type["Accepted"].ok and by_type["Available"].ok:
        idle = by_type["Available"].reason == "Idle"
        return Condition("Ready", "True", "Idle" if idle else "Ready", by_type["Available"].message)
    serving = "" if not by_type["Available"].ok else by_type["Available"].message
    order = [by_type[name] for name in ("Accepted", "Scheduled", "ModelCached", "Available")]
    if by_type["Available"].reason in ("Suspended", "Deleting"):
        order = [by_type["Accepted"], by_type["Available"]]
    first = next((entry for entry in order if entry.status == "False"), by_type["Available"])
    message = first.message
    if serving:
        message += f" (what was accepted before goes on: {serving})"
    return Condition("Ready", "False", first.reason, message[:MESSAGE_LIMIT])


def merged(
    found: Iterable[Condition], before: Iterable[Mapping[str, Any]], generation: int, now: str
) -> list[dict[str, Any]]:
    """Conditions as the API has them. lastTransitionTime moves when the status flips and at no other time."""
    old = {entry.get("type"): entry for entry in before}
    result = []
    for entry in found:
        was = old.get(entry.type) or {}
        kept = was.get("status") == entry.status and was.get("lastTransitionTime")
        result.append(
            {
                "type": entry.type,
                "status": entry.status,
                "reason": entry.reason,
                "message": entry.message[:MESSAGE_LIMIT],
                "observedGeneration": generation,
                "lastTransitionTime": was["lastTransitionTime"] if kept else now,
            }
        )
    return result


def _of(seen: Observed, stage: Stage) -> Trouble | None:
    return worst(trouble for trouble in seen.troubles() if trouble.stage == stage)


def _before(seen: Observed, kind: str) -> Mapping[str, Any]:
    found: Iterable[Mapping[str, Any]] = seen.status.get("conditions") or ()
    return next((entry for entry in found if entry.get("type") == kind), {})
