"""Observed clusters for tests of status: pods in every state that kubelet, scheduler or node controller leave."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from engram_operator.engines.types import EngineStatus, SnapshotCounts, StoreCondition
from engram_operator.status import Observed, status_of

NOW = datetime(2026, 1, 1, 1, tzinfo=UTC)
AN_HOUR_AGO = "2026-01-01T00:00:00Z"
OLD = "2025-01-01T00:00:00Z"


def model(**metadata: Any) -> dict[str, Any]:
    spec = metadata.pop("spec", {})
    status = metadata.pop("status", None)
    found = {
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "EngramModel",
        "metadata": {"name": "m", "namespace": "ns", "generation": 3, "uid": "u", **metadata},
        "spec": {"replicas": 1, **spec},
    }
    return found if status is None else {**found, "status": status}


def stateful_set(replicas: int = 1, revision: str = "m-new") -> dict[str, Any]:
    containers = [{"name": "engine", "image": "engine:1"}]
    return {
        "kind": "StatefulSet",
        "metadata": {"name": "m", "namespace": "ns", "generation": 1, "creationTimestamp": AN_HOUR_AGO, "uid": "s"},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": containers}}},
        "status": {"observedGeneration": 1, "currentRevision": revision, "updateRevision": revision},
    }


def pod(index: int = 0, *, revision: str = "m-new", **parts: Any) -> dict[str, Any]:
    """A pod that serves; `parts` replace parts of it: conditions by type, `init` and `engine` statuses, others."""
    conditions = {
        kind: {"type": kind, "status": "True", "lastTransitionTime": parts.get("since", AN_HOUR_AGO)}
        for kind in ("PodScheduled", "Initialized", "Ready")
    }
    for kind, change in parts.get("conditions", {}).items():
        conditions[kind] = {**conditions.get(kind, {"type": kind}), **change}
    init = {"name": "model", "image": "engine:1", "restartCount": 0, "state": {"terminated": {"exitCode": 0}}}
    engine = {"name": "engine", "image": "engine:1", "restartCount": 0, "ready": True, "started": True}
    engine["state"] = {"running": {}}
    status = {
        "phase": parts.get("phase", "Running"),
        "conditions": list(conditions.values()),
        "initContainerStatuses": [{**init, **parts.get("init", {})}],
        "containerStatuses": [{**engine, **parts.get("engine", {})}],
        **parts.get("status", {}),
    }
    if parts.get("silent"):
        del status["initContainerStatuses"], status["containerStatuses"]
    metadata = {
        "name": f"m-{index}",
        "namespace": "ns",
        "uid": f"p{index}",
        "creationTimestamp": parts.get("since", AN_HOUR_AGO),
        "labels": {"controller-revision-hash": revision},
        **parts.get("metadata", {}),
    }
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n", **parts.get("spec", {})}, "status": status}


NOT_READY = {"Ready": {"status": "False", "reason": "ContainersNotReady"}}


def unready(index: int = 0, **parts: Any) -> dict[str, Any]:
    """A pod whose engine has not been ready; see pod()."""
    conditions = {**NOT_READY, **parts.pop("conditions", {})}
    engine = {"ready": False, "started": False, **parts.pop("engine", {})}
    return pod(index, conditions=conditions, engine=engine, **parts)


def unscheduled(message: str, reason: str = "Unschedulable", **parts: Any) -> dict[str, Any]:
    found = unready(
        conditions={"PodScheduled": {"status": "False", "reason": reason, "message": message}}, silent=True, **parts
    )
    del found["spec"]["nodeName"]
    return found


def waiting(reason: str, message: str = "", *, container: str = "engine", **parts: Any) -> dict[str, Any]:
    state = {"state": {"waiting": {"reason": reason, "message": message}}}
    key = "init" if container == "model" else "engine"
    return unready(**{key: {**state, **parts.pop("entry", {})}}, **parts)


def ended(code: int, message: str = "", reason: str = "Error", *, restarts: int = 3, container: str = "engine") -> Any:
    """A container that ended and is waited with before it is started again."""
    entry = {
        "restartCount": restarts,
        "lastState": {"terminated": {"exitCode": code, "reason": reason, "message": message}},
    }
    return waiting("CrashLoopBackOff", "back-off 40s restarting failed container", container=container, entry=entry)


def report(**parts: Any) -> EngineStatus:
    fields: dict[str, Any] = {
        "phase": "ready",
        "state_abi": "abi",
        "model_digest": "sha",
        "architecture": "llama",
        "weight_bytes": 10,
        "state_bytes": 5,
        "running": 0,
        "waiting": 0,
        "idle_seconds": 1.0,
        "version": "1",
        "dtype": "float32",
        "store": StoreCondition(True, "", ""),
        "snapshots": SnapshotCounts(2, 20, None, None, None),
    }
    return EngineStatus(**{**fields, **parts})


def observed(*pods: Any, **parts: Any) -> Observed:
    """One wanted pod per given one, all else well."""
    fields: dict[str, Any] = {
        "model": model(),
        "mode": "Serving",
        "wanted": len(pods) or 1,
        "served_name": "M",
        "source": "hf://org/repo",
        "snapshots": "LocalOnly",
        "deadline_seconds": 7200,
        "stateful_set": stateful_set(len(pods) or 1),
        "pods": tuple(pods),
    }
    return Observed(**{**fields, **parts})


def condition(seen: Observed, kind: str) -> tuple[str, str, str]:
    entry = status_of(seen, NOW).condition(kind)
    return entry["status"], entry["reason"], entry["message"]
