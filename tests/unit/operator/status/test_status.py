"""The status as a whole: when it changes, what it counts, and what it keeps while nobody answers."""

from __future__ import annotations

from datetime import timedelta

from engram_operator.engines.types import SnapshotCounts
from engram_operator.status import same_status, status_of
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
)


def test_transition_times_move_with_the_status_only() -> None:
    first = status_of(observed(unready()), NOW).status
    times = {entry["type"]: entry["lastTransitionTime"] for entry in first["conditions"]}
    assert set(times.values()) == {"2026-01-01T01:00:00Z"}
    later = NOW + timedelta(minutes=5)
    again = status_of(observed(unready(), model=model(status=first)), later).status
    assert same_status(first, again), "nothing changed: nothing is written"
    # another reason, the same status
    crashed = status_of(observed(ended(1, "boom"), model=model(status=first)), later)
    assert crashed.condition("Ready")["lastTransitionTime"] == times["Ready"]
    assert crashed.condition("Ready")["reason"] == "CrashLoopBackOff"
    up = status_of(observed(pod(), model=model(status=first)), later)
    assert up.condition("Ready")["lastTransitionTime"] == "2026-01-01T01:05:00Z"
    assert up.condition("Accepted")["lastTransitionTime"] == times["Accepted"]


def test_the_deadline_says_when_to_look_again() -> None:
    moving = status_of(observed(unready(since="2026-01-01T00:59:00Z"), deadline_seconds=300), NOW)
    assert moving.condition("Progressing")["status"] == "True"
    assert moving.look_again == 240
    assert status_of(observed(pod()), NOW).look_again is None
    # a rollout that begins counts, however old the pods are
    since = NOW - timedelta(seconds=10)
    old = observed(pod(revision="m-old", since=OLD), deadline_seconds=60, since=since)
    assert status_of(old, NOW).look_again == 50


def test_counts_and_facts() -> None:
    engines = {"m-0": report(), "m-1": report(snapshots=SnapshotCounts(3, 30, 5.0, 6.0, "denied: https://s3/x?sig=1"))}
    shared = status_of(observed(pod(0), pod(1), unready(2), snapshots="Store", engines=engines), NOW).status
    assert shared["snapshots"] == {
        "count": 3,
        "totalBytes": 30,
        "lastSuccessTime": "1970-01-01T00:00:05Z",
        "lastFailureTime": "1970-01-01T00:00:06Z",
        "lastError": "denied: https://s3/x",
    }
    own = status_of(observed(pod(0), pod(1), engines=engines), NOW).status
    assert own["snapshots"]["count"] == 5, "tiers of their own add up"
    assert {k: shared[k] for k in ("replicas", "desiredReplicas", "readyReplicas", "updatedReplicas")} == {
        "replicas": 3, "desiredReplicas": 3, "readyReplicas": 2, "updatedReplicas": 3,
    }  # fmt: skip
    assert shared["model"] == {
        "name": "M", "digest": "sha", "architecture": "llama", "weightBytes": 10, "stateBytes": 5, "stateABI": "abi",
    }  # fmt: skip
    assert shared["selector"] == "app.kubernetes.io/instance=m,app.kubernetes.io/name=engram-engine"
    assert (shared["url"], shared["image"]) == ("http://m.ns.svc:8000", "engine:1")
    # what engines said is kept while none answers
    asleep = status_of(observed(wanted=0, mode="Asleep", model=model(status=shared), snapshots="Store"), NOW).status
    assert asleep["model"] == shared["model"]
    assert asleep["snapshots"] == shared["snapshots"]


def test_the_commit_of_a_download_is_recorded() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    message = f"/cache/models/x: complete at revision {commit}, 5 files, 41Gi"
    seen = observed(pod(init={"state": {"terminated": {"exitCode": 0, "message": message}}}))
    assert status_of(seen, NOW).status["model"]["resolvedRevision"] == commit
    assert condition(seen, "ModelCached")[2] == message
    later = observed(pod(), model=model(status=status_of(seen, NOW).status))
    assert status_of(later, NOW).status["model"]["resolvedRevision"] == commit, "an answer once is kept"


def test_several_pods_with_the_same_trouble_are_one_message() -> None:
    found = condition(observed(ended(1, "boom"), ended(1, "boom"), ended(1, "boom")), "Ready")
    assert "(and 2 other pods)" in found[2]


def test_replicas_that_hold_different_weights() -> None:
    engines = {"m-0": report(model_digest="a" * 64), "m-1": report(model_digest="b" * 64)}
    status, reason, message = condition(observed(pod(0), pod(1), engines=engines), "UpToDate")
    assert (status, reason) == ("False", "WeightsDiffer")
    assert "m-0 aaaaaaaaaaaa, m-1 bbbbbbbbbbbb" in message
    # while a new version rolls out they differ by right
    assert condition(observed(pod(0, revision="m-old"), pod(1), engines=engines), "UpToDate")[0] == "True"


def test_pods_from_before_a_change_are_not_updated_although_their_set_still_names_their_revision() -> None:
    """The StatefulSet's controller takes a moment to see a new template."""
    changed = stateful_set(2)
    changed["metadata"]["generation"] = 2
    seen = observed(pod(0), pod(1), stateful_set=changed, since=NOW - timedelta(seconds=5))
    assert status_of(seen, NOW).status["updatedReplicas"] == 0
    assert condition(seen, "Progressing")[1] == "RolloutInProgress"
    scaled = observed(pod(0), pod(1), stateful_set=changed, since=NOW - timedelta(hours=2))
    assert status_of(scaled, NOW).status["updatedReplicas"] == 2, "another number of replicas is no other version"
