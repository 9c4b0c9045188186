"""Pods that a StatefulSet would leave alone: on a node that went away, or of a broken revision.

A StatefulSet never replaces a pod whose node does not answer: two pods of one name could run at once. Ours may:
durable state is in the store, and refs move by compare-and-swap, so a twin behind a partition can at worst make a
branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from engram_operator.builders.settings import ENGINE
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.kinds import PODS
from engram_operator.status.pods import condition, container_status, is_lost, is_ready, is_terminating, parse_time

REVISION = "controller-revision-hash"
# A kubelet that lives ends a pod before its grace time is over; later than this, none does.
OVERDUE = timedelta(seconds=10)


def lost_pods(pods: Iterable[Object], now: datetime) -> list[Object]:
    """Pods that were evicted from a node because it is gone.

    A person can evict with a taint as well, from a node that is well: its kubelet then says why the pod is not ready,
    or the pod still is, and it gets its time to finish its turns.
    """
    return [pod for pod in pods if is_lost(pod) and (_silent(pod) or _overdue(pod, now))]


def _silent(pod: Object) -> bool:
    """The node controller, which gives no reason, marked it not ready; the kubelet has said nothing since."""
    ready = condition(pod, "Ready")
    return ready.get("status") in ("False", "Unknown") and ready.get("reason") in (None, "", "NodeStatusUnknown")


def _overdue(pod: Object, now: datetime) -> bool:
    """deletionTimestamp is when the grace time ends."""
    ends = parse_time(pod["metadata"].get("deletionTimestamp"))
    return ends is not None and now > ends + OVERDUE


def stuck_pods(stateful_set: Mapping[str, Any] | None, pods: Iterable[Object]) -> list[Object]:
    """Pods of an old revision whose engine does not run: nothing is lost with them, and a StatefulSet may wait for
    such a pod for ever before it brings in the revision that repairs it."""
    status = (stateful_set or {}).get("status") or {}
    metadata = (stateful_set or {}).get("metadata") or {}
    revision = status.get("updateRevision")
    if not revision or int(status.get("observedGeneration") or 0) < int(metadata.get("generation") or 0):
        return []
    return [
        pod
        for pod in pods
        if (pod["metadata"].get("labels") or {}).get(REVISION) not in (None, revision)
        and not is_terminating(pod)
        and not is_ready(pod)
        and not _engine_runs(pod)
    ]


def _engine_runs(pod: Object) -> bool:
    """It started, so it may hold conversations and is left to the rollout, which drains it."""
    engine = container_status(pod, ENGINE)
    return bool(engine.get("started")) and "running" in (engine.get("state") or {})


async def tend(kube: Kube, model: Object, stateful_set: Object | None, pods: Iterable[Object], now: datetime) -> None:
    """Delete what the StatefulSet waits for in vain, and say so."""
    pods = list(pods)
    for pod in lost_pods(pods, now):
        name, node = pod["metadata"]["name"], (pod.get("spec") or {}).get("nodeName", "?")
        if await kube.delete(PODS, name, pod["metadata"]["namespace"], uid=pod["metadata"]["uid"], grace_seconds=0):
            text = f"pod {name} is replaced: its node {node} is lost. Conversations go on from their snapshots"
            await kube.event(model, "NodeLost", text, type="Warning", action="ReplacePod")
    for pod in stuck_pods(stateful_set, pods):
        name = pod["metadata"]["name"]
        if await kube.delete(PODS, name, pod["metadata"]["namespace"], uid=pod["metadata"]["uid"]):
            text = f"pod {name} of an older revision never became ready and is replaced by the new one"
            await kube.event(model, "StuckPodReplaced", text, action="ReplacePod")


def overdue_in(pods: Iterable[Object], now: datetime) -> float | None:
    """Seconds until a pod that may be lost is taken for lost; None when there is none."""
    ends: list[Any] = [parse_time(pod["metadata"].get("deletionTimestamp")) for pod in pods if is_lost(pod)]
    waits = [(end + OVERDUE - now).total_seconds() + 1 for end in ends if end is not None]
    return max(1.0, min(waits)) if waits else None
