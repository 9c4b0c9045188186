"""Every condition, every reason: what is observed, and what a person is told of it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from engram_operator.engines.types import StoreCondition
from engram_operator.status import Observed, Refusal, status_of
from tests.unit.operator.documents import SCHEMAS
from tests.unit.operator.status.observations import (
    NOW,
    OLD,
    condition,
    ended,
    model,
    observed,
    pod,
    report,
    stateful_set,
    unready,
    unscheduled,
    waiting,
)

SCHEDULER = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."
QUOTA = (
    'create Pod m-0 in StatefulSet m failed error: pods "m-0" is forbidden: exceeded quota: gpus, requested:'
    " requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4"
)
PULL = 'Back-off pulling image "engine:1": ErrImagePull: rpc error: code = NotFound desc = not found'
NOTE = tuple[str, ...]


def noted(*notes: str, kind: str = "Pod", name: str = "m-0") -> dict[tuple[str, str], NOTE]:
    return {(kind, name): notes}


def lost_pod() -> dict[str, Any]:
    disruption = {
        "status": "True",
        "reason": "DeletionByTaintManager",
        "message": "Taint manager: deleting due to NoExecute taint",
    }
    return unready(conditions={"DisruptionTarget": disruption}, metadata={"deletionTimestamp": "2026-01-01T01:00:00Z"})


refused = observed(refused=Refusal("PolicyNotFound", 'no SnapshotPolicy "x"'))
CASES: list[tuple[str, Observed, str, str, str, str]] = [
    # what, observed, condition, status, reason, part of the message
    ("serving", observed(pod()), "Accepted", "True", "Accepted", ""),
    ("refused", refused, "Accepted", "False", "PolicyNotFound", 'no SnapshotPolicy "x"'),
    ("notice", observed(pod(), notice="no PodMonitor API"), "Accepted", "True", "Accepted", "no PodMonitor API"),
    (
        "secret volume",
        observed(
            unready(silent=True),
            warnings=noted('MountVolume.SetUp failed for volume "a" : secret "api-keys" not found'),
        ),
        "Accepted",
        "False",
        "SecretNotFound",
        'm-0: Secret "api-keys" does not exist',
    ),
    (
        "secret in the environment",
        observed(waiting("CreateContainerConfigError", 'secret "s3" not found')),
        "Accepted",
        "False",
        "SecretNotFound",
        'm-0: Secret "s3" does not exist',
    ),
    (
        "secret without the key",
        observed(waiting("CreateContainerConfigError", "couldn't find key token in Secret ns/hf")),
        "Accepted",
        "False",
        "SecretNotFound",
        'Secret "hf" has no key "token"',
    ),
    (
        "secret volume without the key",
        observed(
            unready(silent=True), warnings=noted("MountVolume.SetUp failed: references non-existent secret key: key")
        ),
        "Accepted",
        "False",
        "SecretNotFound",
        'a Secret has no key "key"',
    ),
    (
        "certificate",
        observed(
            unready(silent=True), warnings=noted('MountVolume.SetUp failed for volume "c" : configmap "ca" not found')
        ),
        "Accepted",
        "False",
        "ConfigMapNotFound",
        'ConfigMap "ca" does not exist',
    ),
    (
        "a secret lost while others serve",
        observed(pod(), waiting("CreateContainerConfigError", 'secret "s3" not found', metadata={"name": "m-1"})),
        "Accepted",
        "True",
        "Accepted",
        "",
    ),
    ("scheduled", observed(pod()), "Scheduled", "True", "Scheduled", ""),
    ("no pods wanted", observed(wanted=0), "Scheduled", "True", "NotNeeded", "no pods"),
    ("no pods yet", observed(), "Scheduled", "Unknown", "NoPods", "being made"),
    ("no set", observed(stateful_set=None), "Scheduled", "Unknown", "NoPods", "no StatefulSet"),
    (
        "just made",
        observed(unready(silent=True, spec={"nodeName": ""})),
        "Scheduled",
        "Unknown",
        "WaitingForScheduler",
        "",
    ),
    ("no GPU", observed(unscheduled(SCHEDULER)), "Scheduled", "False", "InsufficientGPU", SCHEDULER),
    (
        "no memory",
        observed(unscheduled("0/1 nodes: 1 Insufficient memory.")),
        "Scheduled",
        "False",
        "InsufficientResources",
        "memory",
    ),
    (
        "selector",
        observed(unscheduled("0/1 nodes: 1 node(s) didn't match")),
        "Scheduled",
        "False",
        "NoMatchingNode",
        "match",
    ),
    ("gated", observed(unscheduled("gated", "SchedulingGated")), "Scheduled", "False", "SchedulingGated", "gated"),
    (
        "unbound",
        observed(unscheduled("0/1 nodes: pod has unbound immediate PersistentVolumeClaims.")),
        "Scheduled",
        "False",
        "VolumeNotBound",
        "unbound immediate",
    ),
    (
        "no storage class",
        observed(
            unscheduled(
                "pod has unbound immediate PersistentVolumeClaims",
                spec={"volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache-m-0"}}]},
            ),
            warnings=noted(
                'storageclass.storage.k8s.io "fast" not found', kind="PersistentVolumeClaim", name="cache-m-0"
            ),
        ),
        "Scheduled",
        "False",
        "StorageClassNotFound",
        '"fast" not found',
    ),
    (
        "claim missing",
        observed(unscheduled('persistentvolumeclaim "w" not found')),
        "Scheduled",
        "False",
        "VolumeNotBound",
        '"w" not found',
    ),
    (
        "quota",
        observed(warnings=noted(QUOTA, kind="StatefulSet", name="m")),
        "Scheduled",
        "False",
        "QuotaExceeded",
        "exceeded quota: gpus",
    ),
    (
        "account",
        observed(
            warnings=noted(
                'error looking up service account ns/x: serviceaccount "x" not found', kind="StatefulSet", name="m"
            )
        ),
        "Scheduled",
        "False",
        "ServiceAccountNotFound",
        '"x" not found',
    ),
    (
        "admission",
        observed(warnings=noted("violates PodSecurity restricted", kind="StatefulSet", name="m")),
        "Scheduled",
        "False",
        "PodsRefused",
        "violates PodSecurity",
    ),
    (
        "cached",
        observed(pod(init={"state": {"terminated": {"exitCode": 0, "message": "41 GB in 80 s"}}})),
        "ModelCached",
        "True",
        "Cached",
        "41 GB",
    ),
    ("on a claim", observed(pod(), source="pvc://c"), "ModelCached", "True", "NotNeeded", ""),
    (
        "downloading",
        observed(waiting("PodInitializing", init={"state": {"running": {"startedAt": OLD}}})),
        "ModelCached",
        "False",
        "Downloading",
        f"m-0 downloads hf://org/repo since {OLD}",
    ),
    (
        "checking",
        observed(waiting("PodInitializing", init={"state": {"running": {"startedAt": OLD}}}), source="file:///m"),
        "ModelCached",
        "False",
        "Checking",
        "m-0 checks file:///m",
    ),
    (
        "download failed",
        observed(ended(1, "hf://org/repo: 401 for https://hub/x?token=abc", container="model")),
        "ModelCached",
        "False",
        "DownloadFailed",
        "container model: exit code 1, 3 restarts: hf://org/repo: 401 for https://hub/x",
    ),
    (
        "no space",
        observed(ended(1, "No space left on device", container="model")),
        "ModelCached",
        "False",
        "NoSpace",
        "No space left",
    ),
    ("weights not reached", observed(unready(silent=True)), "ModelCached", "Unknown", "Waiting", ""),
    (
        "cached before sleep",
        observed(
            wanted=0,
            model=model(
                status={"conditions": [{"type": "ModelCached", "status": "True", "reason": "Cached", "message": "x"}]}
            ),
        ),
        "ModelCached",
        "True",
        "Cached",
        "x",
    ),
    ("available", observed(pod()), "Available", "True", "MinimumReplicasAvailable", "1 of 1 replicas are ready"),
    (
        "one of two",
        observed(pod(), ended(1, "boom")),
        "Available",
        "True",
        "MinimumReplicasAvailable",
        "1 of 2 replicas are ready; m-0: container engine: exit code 1",
    ),
    ("loading", observed(unready()), "Available", "False", "NoReadyReplicas", "m-0: the engine loads the model"),
    (
        "probe",
        observed(unready(engine={"started": True}), warnings=noted("Readiness probe failed: 503")),
        "Available",
        "False",
        "NotReady",
        "503",
    ),
    (
        "crash",
        observed(ended(1, "ValueError: bad dtype")),
        "Available",
        "False",
        "CrashLoopBackOff",
        "exit code 1, 3 restarts: ValueError: bad dtype",
    ),
    ("memory", observed(ended(137, "", "OOMKilled")), "Available", "False", "OOMKilled", "exit code 137 (OOMKilled)"),
    ("image", observed(waiting("ImagePullBackOff", PULL)), "Available", "False", "ImagePullBackOff", "not found"),
    (
        "image at first",
        observed(waiting("ErrImagePull", "rpc error: no such host")),
        "Available",
        "False",
        "ImagePullBackOff",
        "image engine:1: rpc error",
    ),
    (
        "image, why only in the event",
        observed(
            waiting("ImagePullBackOff", 'Back-off pulling image "engine:1"'),
            warnings=noted('Failed to pull image "engine:1": unauthorized'),
        ),
        "Available",
        "False",
        "ImagePullBackOff",
        "unauthorized",
    ),
    (
        "image name",
        observed(waiting("InvalidImageName", "couldn't parse")),
        "Available",
        "False",
        "InvalidImageName",
        "couldn't parse",
    ),
    (
        "root image",
        observed(waiting("CreateContainerConfigError", "container has runAsNonRoot and image has root")),
        "Available",
        "False",
        "CreateContainerConfigError",
        "runAsNonRoot",
    ),
    (
        "evicted",
        observed(unready(phase="Failed", status={"reason": "Evicted", "message": "low on memory"})),
        "Available",
        "False",
        "Evicted",
        "low on memory",
    ),
    (
        "attached elsewhere",
        observed(unready(silent=True), warnings=noted('Multi-Attach error for volume "pvc-1"')),
        "Available",
        "False",
        "VolumeNotAttached",
        "Multi-Attach",
    ),
    (
        "mount",
        observed(unready(silent=True), warnings=noted("MountVolume.SetUp failed: nfs timed out")),
        "Available",
        "False",
        "VolumeNotMounted",
        "nfs",
    ),
    (
        "sandbox",
        observed(unready(silent=True), warnings=noted("Failed to create pod sandbox: cni")),
        "Available",
        "False",
        "PodNotStarted",
        "sandbox",
    ),
    ("node lost", observed(lost_pod()), "Available", "False", "NodeLost", "node lost: Taint manager"),
    (
        "ending",
        observed(pod(metadata={"deletionTimestamp": OLD})),
        "Available",
        "False",
        "NoReadyReplicas",
        "finishes its turns",
    ),
    (
        "suspended",
        observed(wanted=0, mode="Suspended", model=model(spec={"suspend": True})),
        "Available",
        "False",
        "Suspended",
        "spec.suspend is true",
    ),
    ("scaled to zero", observed(wanted=0, mode="Suspended"), "Available", "False", "Suspended", "spec.replicas is 0"),
    ("asleep", observed(wanted=0, mode="Asleep"), "Available", "True", "Idle", "next request wakes"),
    ("deleting", observed(pod(), wanted=0, mode="Deleting"), "Available", "False", "Deleting", "1 pods are left"),
    ("rolled out", observed(pod()), "Progressing", "True", "RolloutComplete", "1 of 1"),
    (
        "rolling",
        observed(pod(), pod(1, revision="m-old")),
        "Progressing",
        "True",
        "RolloutInProgress",
        "1 run the wanted version",
    ),
    ("scaling up", observed(pod(), wanted=2), "Progressing", "True", "ScalingUp", "1 of 2"),
    ("scaling down", observed(pod(), pod(1), wanted=1), "Progressing", "True", "ScalingDown", ""),
    (
        "stuck",
        observed(ended(1, "boom"), deadline_seconds=60),
        "Progressing",
        "False",
        "ProgressDeadlineExceeded",
        "60 s: 0 of 1 replicas are ready, 1 run the wanted version; m-0: container engine: exit code 1",
    ),
    ("paused", observed(wanted=0, mode="Suspended"), "Progressing", "False", "Paused", ""),
    ("creating", observed(stateful_set=None), "Progressing", "True", "Creating", ""),
    ("not accepted", observed(stateful_set=None, refused=Refusal("X", "y")), "Progressing", "False", "NotAccepted", ""),
    ("sleeping", observed(wanted=0, mode="Asleep", stateful_set=stateful_set(0)), "Progressing", "True", "Idle", ""),
    ("drain", observed(pod(), wanted=0, mode="Deleting"), "Progressing", "True", "Draining", ""),
    ("local", observed(pod()), "SnapshotsReady", "True", "LocalOnly", "no SnapshotPolicy"),
    ("off", observed(pod(), snapshots="Disabled"), "SnapshotsReady", "True", "Disabled", ""),
    (
        "store",
        observed(pod(), snapshots="Store", engines={"m-0": report()}),
        "SnapshotsReady",
        "True",
        "StoreReachable",
        "",
    ),
    (
        "denied",
        observed(
            pod(),
            snapshots="Store",
            engines={
                "m-0": report(store=StoreCondition(False, "AccessDenied", "403 for https://s3/b?X-Amz-Signature=abc"))
            },
        ),
        "SnapshotsReady",
        "False",
        "AccessDenied",
        "m-0: 403 for https://s3/b",
    ),
    ("silent", observed(pod(), snapshots="Store"), "SnapshotsReady", "Unknown", "NoReport", ""),
    (
        "policy missing",
        observed(pod(), snapshots="Store", refused=Refusal("PolicyNotFound", "p")),
        "SnapshotsReady",
        "False",
        "PolicyNotFound",
        "p",
    ),
    ("current", observed(pod()), "UpToDate", "True", "UpToDate", ""),
    (
        "upgrade waits",
        observed(pod(), pending="image a -> b"),
        "UpToDate",
        "False",
        "OperatorUpgradePending",
        "image a -> b",
    ),
    ("ready", observed(pod()), "Ready", "True", "Ready", "1 of 1 replicas are ready"),
    ("idle", observed(wanted=0, mode="Asleep"), "Ready", "True", "Idle", "next request"),
    ("not scheduled", observed(unscheduled(SCHEDULER)), "Ready", "False", "InsufficientGPU", f"m-0: {SCHEDULER}"),
    ("download", observed(ended(1, "401", container="model")), "Ready", "False", "DownloadFailed", "401"),
    ("crashed", observed(ended(1, "boom")), "Ready", "False", "CrashLoopBackOff", "boom"),
    (
        "asked to rest",
        observed(wanted=0, mode="Suspended", model=model(spec={"suspend": True})),
        "Ready",
        "False",
        "Suspended",
        "spec.suspend",
    ),
    (
        "wrong while it serves",
        observed(pod(), refused=Refusal("InvalidPodTemplate", "spec.podTemplate.spec.x: unknown")),
        "Ready",
        "False",
        "InvalidPodTemplate",
        "spec.podTemplate.spec.x: unknown (what was accepted before goes on: 1 of 1 replicas are ready)",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case[2]}-{case[0]}" for case in CASES])
def test_conditions(case: tuple[str, Observed, str, str, str, str]) -> None:
    _, seen, kind, status, reason, message = case
    found = condition(seen, kind)
    assert found[:2] == (status, reason)
    assert message in found[2]
    assert "token=" not in found[2]
    assert "Signature" not in found[2]


PHASES: list[tuple[str, Observed]] = [
    ("Pending", observed()),
    ("Pending", observed(unscheduled(SCHEDULER))),
    ("Downloading", observed(waiting("PodInitializing", init={"state": {"running": {}}}))),
    ("Loading", observed(unready())),
    ("Ready", observed(pod())),
    ("Updating", observed(pod(), pod(1, revision="m-old"))),
    ("Updating", observed(pod(), unready(1))),
    ("Degraded", observed(pod(), ended(1))),
    ("Degraded", observed(pod(), refused=Refusal("InvalidSpec", "x"))),
    ("Suspended", observed(wanted=0, mode="Suspended")),
    ("Idle", observed(wanted=0, mode="Asleep")),
    ("Draining", observed(pod(), wanted=0, mode="Suspended")),
    ("Draining", observed(pod(), wanted=0, mode="Deleting")),
    ("Failed", observed(ended(1))),
    ("Failed", observed(unscheduled(SCHEDULER), deadline_seconds=60)),
    ("Failed", refused),
]


@pytest.mark.parametrize(("phase", "seen"), PHASES, ids=[f"{i}-{p}" for i, (p, _) in enumerate(PHASES)])
def test_phase(phase: str, seen: Observed) -> None:
    assert status_of(seen, NOW).status["phase"] == phase


def test_every_status_fits_the_definition() -> None:
    """Phases are of its enumeration, reasons match its pattern, and no field is dropped."""
    phases = SCHEMAS.schema("EngramModel")["properties"]["status"]["properties"]["phase"]["enum"]
    assert {phase for phase, _ in PHASES} == set(phases)
    for seen in [case[1] for case in CASES] + [seen for _, seen in PHASES]:
        status = status_of(seen, NOW).status
        body = {**model(), "apiVersion": "engram.dev/v1alpha1", "status": status}
        body["spec"] = {"model": {"uri": "hf://a/b"}}
        assert SCHEMAS.admit(body)["status"] == status
        assert len(status["conditions"]) == 8
        for entry in status["conditions"]:
            assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", entry["reason"])
            assert entry["observedGeneration"] == 3


def test_the_order_of_pods_does_not_matter() -> None:
    pods = [
        pod(0),
        ended(1, "boom"),
        unready(2),
        pod(3, revision="m-old"),
        unscheduled(SCHEDULER, metadata={"name": "m-4"}),
    ]
    expected = status_of(observed(*pods), NOW).status
    for seed in range(10):
        shuffled = list(pods)
        random.Random(seed).shuffle(shuffled)
        assert status_of(observed(*shuffled), NOW).status == expected
