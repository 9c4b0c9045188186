"""A spec that cannot be in force is said to be so, and never replaces one that works."""

from __future__ import annotations

from typing import Any

import pytest

from engram_operator.controllers.model import NOTICE_SECONDS
from engram_operator.kube.kinds import MODELS, POD_MONITORS, PODS, POLICIES, SECRETS, SERVICES, STATEFULSETS
from tests.unit.operator.controllers.world import NS, World, running

INVALID = 'StatefulSet.apps "m" is invalid: spec.template.spec.containers[0].foo: Invalid value: "x"'


async def test_the_wrong_and_then_the_right() -> None:
    world = World()
    world.model(uri="hf://noslash")
    await world.look()
    assert world.condition("Accepted")[:2] == ("False", "InvalidModelURI")
    assert "hf://ORG/REPO" in world.condition("Ready")[2]
    assert world.status()["phase"] == "Failed"
    assert world.kube.all(STATEFULSETS) == []
    assert world.kube.all(SECRETS) == []
    world.kube.edit(MODELS, NS, "m", {"spec": {"model": {"uri": "hf://org/repo"}}})
    await world.steady()
    assert world.condition("Ready")[:2] == ("True", "Ready")


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("InvalidModelURI", {"model": {"uri": "hf://noslash"}}, "spec.model.uri"),
    ("PolicyNotFound", {"snapshots": {"policyRef": {"name": "gone"}}}, 'no SnapshotPolicy "gone"'),
    ("InvalidPodTemplate", {"podTemplate": {"spec": {"hostNetwork": True}}}, "spec.podTemplate.spec.hostNetwork"),
    ("InvalidPodTemplate", {"podTemplate": {"spek": {}}}, "did you mean spec?"),
    ("UnsupportedParallelism", {"parallelism": {"tensor": 2}, "accelerator": {"resourceName": ""}}, "tensor: 2 needs"),
    ("InvalidEngineArgs", {"engine": {"args": ["--port", "1"]}}, "spec.engine.args[0]"),
    ("InvalidSpec", {"cache": {"size": "many"}}, "spec.cache.size"),
]


@pytest.mark.parametrize(("reason", "patch", "message"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)])
async def test_what_works_goes_on(reason: str, patch: dict[str, Any], message: str) -> None:
    world = World()
    world.model()
    await world.steady()
    before = world.stateful_set()
    world.kube.edit(MODELS, NS, "m", {"spec": patch})
    world.kube.forget_requests()
    await world.look()
    assert world.condition("Accepted")[:2] == ("False", reason)
    assert message in world.condition("Ready")[2]
    assert "1 of 1 replicas are ready" in world.condition("Ready")[2]
    assert world.status()["phase"] == "Degraded"
    assert world.stateful_set() == before
    assert [write[4] for write in world.kube.writes()] == ["status"]


async def test_a_store_that_no_pod_can_use() -> None:
    world = World()
    world.policy(uri="file:///srv/memory")
    world.model()
    await world.look()
    assert world.condition("Accepted")[:2] == ("False", "StoreNotUsable")
    assert "use s3:// or pvc://" in world.condition("Ready")[2]
    assert world.condition("SnapshotsReady")[:2] == ("False", "StoreNotUsable")
    world.kube.remove(POLICIES, NS, "default")
    await world.steady()
    assert world.condition("SnapshotsReady")[:2] == ("True", "LocalOnly")


async def test_the_api_servers_judgement_names_the_field_of_the_pod_template() -> None:
    world = World()
    world.model()
    await world.steady()
    before = world.stateful_set()
    world.kube.edit(MODELS, NS, "m", {"spec": {"podTemplate": {"spec": {"dnsPolicy": "x"}}, "replicas": 2}})
    refusal = world.kube.fail(422, "patch", STATEFULSETS, times=None, message=INVALID)
    await world.look()
    status, reason, message = world.condition("Accepted")
    assert (status, reason) == ("False", "InvalidPodTemplate")
    assert "spec.podTemplate.spec.containers[0].foo: Invalid value" in message
    assert world.stateful_set() == before
    world.kube.forget_requests()
    world.later(10)
    await world.look()
    assert world.kube.writes() == [], "what was found invalid is not tried again and again"
    refusal.times = 0
    world.kube.edit(MODELS, NS, "m", {"spec": {"podTemplate": None}})
    await world.steady()
    assert world.condition("Accepted")[0] == "True"
    assert world.stateful_set()["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [  # as the API server says it, with status 500
        (
            "failed to create typed patch object (default/m; apps/v1, Kind=StatefulSet): .spec.template.spec.bogus:"
            " field not declared in schema",
            ".spec.podTemplate.spec.bogus: field not declared",
        ),
        (
            "failed to convert new object (default/m; apps/v1, Kind=StatefulSet) to proper version: unable to convert"
            " unstructured object to apps/v1, Kind=StatefulSet: quantities must match the regular expression",
            "quantities must match",
        ),
    ],
)
async def test_what_no_pod_can_be_made_of_is_the_users_fault_and_not_the_servers(words: str, told: str) -> None:
    world = World()
    world.model(podTemplate={"spec": {"bogus": 1}})
    world.kube.fail(500, "patch", STATEFULSETS, times=None, message=words)
    await world.look()
    assert world.condition("Accepted")[:2] == ("False", "InvalidPodTemplate")
    assert told in world.condition("Ready")[2]
    assert [kind for _, kind, *_ in world.kube.writes() if kind == "services"] == [], (
        "nothing before the pods are right"
    )


async def test_a_policy_of_the_cluster_that_says_no() -> None:
    world = World()
    world.model()
    world.kube.fail(403, "patch", STATEFULSETS, times=None, message="ValidatingAdmissionPolicy 'x' denied request")
    again = await world.look()
    assert world.condition("Accepted")[:2] == ("False", "Forbidden")
    assert "ValidatingAdmissionPolicy 'x' denied" in world.condition("Ready")[2]
    assert again is not None
    assert again <= 30


async def test_a_server_that_fails_over_one_object_is_told_and_asked_again() -> None:
    world = World()
    world.model()
    words = 'failed to allocate a serviceIP for Service "m": range is full'
    failure = world.kube.fail(500, "patch", SERVICES, times=None, message=words)
    again = await world.look()
    assert world.condition("Accepted")[:2] == ("False", "ServerFailed")
    assert world.condition("Ready")[2] == f"the API server fails over Service: {words}"
    assert again is not None
    assert again <= 30
    failure.times = 0
    await world.steady()
    assert world.condition("Accepted")[0] == "True"


async def test_a_server_that_does_not_know_our_kind_yet_is_asked_again_soon_and_nobody_is_alarmed() -> None:
    world = World()
    world.model()
    words = (
        'statefulsets.apps "m" is forbidden: cannot set blockOwnerDeletion in this case because cannot find RESTMapping'
        ' for APIVersion engram.dev/v1alpha1 Kind EngramModel: no matches for kind "EngramModel"'
    )
    failure = world.kube.fail(403, "patch", STATEFULSETS, times=None, message=words)
    again = await world.look()
    assert again is not None
    assert again <= 2
    assert world.kube.store.requests[-1].verb == "patch", "neither a status nor an event says that something is wrong"
    failure.times = 0
    await world.steady()
    assert world.condition("Accepted")[0] == "True"


async def test_a_webhook_that_is_away_is_told_once() -> None:
    """Its message has the local port of the connection, which is another each time."""
    world = World()
    world.model()
    words = "failed calling webhook: read tcp 10.0.0.1:{port}->10.0.0.9:443: connection reset"
    failure = world.kube.fail(500, "patch", STATEFULSETS, times=None, message=words.format(port=40001))
    await world.look()
    assert "10.0.0.1->10.0.0.9:443: connection reset" in world.condition("Ready")[2]
    world.kube.forget_requests()
    failure.message = words.format(port=40002)
    world.later(31)
    await world.look()
    assert [write for write in world.kube.writes() if write[1] == "engrammodels"] == []


@pytest.mark.parametrize("owner", [None, {"kind": "Ingress", "name": "shop", "uid": "i", "controller": True}])
async def test_an_object_of_somebody_else_is_not_taken_over(owner: dict[str, Any] | None) -> None:
    world = World()
    metadata: dict[str, Any] = {"name": "m"}
    if owner is not None:
        metadata["ownerReferences"] = [{"apiVersion": "v1", **owner}]
    spec = {"selector": {"app": "shop"}}
    world.kube.put({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    world.model()
    await world.look()
    assert world.condition("Accepted")[:2] == ("False", "NameTaken")
    assert 'Service "m" exists and belongs to' in world.condition("Ready")[2]
    found = world.kube.find(SERVICES, NS, "m")
    assert found is not None
    assert found["spec"] == spec
    world.kube.remove(SERVICES, NS, "m")
    await world.steady()
    assert world.condition("Ready")[0] == "True"


async def test_children_orphaned_on_purpose_are_taken_back() -> None:
    world = World()
    world.model()
    await world.steady()
    for kind, name in ((SERVICES, "m"), (STATEFULSETS, "m")):
        world.kube.edit(kind, NS, name, {"metadata": {"ownerReferences": None}})
    await world.steady()
    assert world.condition("Ready")[0] == "True"
    assert world.stateful_set()["metadata"]["ownerReferences"][0]["kind"] == "EngramModel"


async def test_claims_cannot_change() -> None:
    world = World()
    world.model(cache={"type": "PersistentVolumeClaim", "size": "10Gi"})
    await world.steady()
    world.kube.edit(MODELS, NS, "m", {"spec": {"cache": {"size": "20Gi"}}})
    await world.look()
    assert world.condition("Accepted")[:2] == ("False", "ImmutableFieldChanged")
    assert "spec.cache.size: cannot change from 10Gi to 20Gi" in world.condition("Ready")[2]
    world.kube.edit(MODELS, NS, "m", {"spec": {"cache": {"size": "10Gi"}}})
    await world.steady()
    assert world.condition("Ready")[0] == "True"


async def test_a_cluster_without_pod_monitors_is_told_so_and_nothing_more() -> None:
    world = World()
    world.model(monitoring={"enabled": True})
    await world.steady()
    assert world.condition("Accepted") == (
        "True",
        "Accepted",
        "spec.monitoring: this cluster has no PodMonitor API; metrics are served on the admin port anyway",
    )
    assert world.condition("Ready")[0] == "True"


async def test_pod_monitors_that_are_installed_later_are_found_without_an_event() -> None:
    world = World()
    world.model(monitoring={"enabled": True}, suspend=True)
    await world.steady()
    again = await world.look()
    assert again is not None
    assert again <= NOTICE_SECONDS
    world.kube.store.served.add(POD_MONITORS)
    world.later(again + 1)
    await world.steady()
    assert len(world.kube.all(POD_MONITORS)) == 1
    assert await world.look() is None


async def test_a_pod_monitor_comes_and_goes() -> None:
    world = World()
    world.kube.store.served.add(POD_MONITORS)
    world.model(monitoring={"enabled": True})
    await world.steady()
    assert len(world.kube.all(POD_MONITORS)) == 1
    world.kube.edit(POD_MONITORS, NS, "m", {"spec": {"podMetricsEndpoints": []}})
    await world.steady()
    assert world.kube.all(POD_MONITORS)[0]["spec"]["podMetricsEndpoints"][0]["port"] == "admin"
    world.kube.edit(MODELS, NS, "m", {"spec": {"monitoring": {"enabled": False}}})
    await world.steady()
    assert world.kube.all(POD_MONITORS) == []


async def test_a_missing_secret_is_named_from_the_pods_events() -> None:
    world = World()
    world.model(auth={"apiKeysSecretRef": {"name": "api-keys"}})
    await world.look()
    world.settle(ready=False)
    (pod,) = world.pods()
    stuck = running()
    stuck["conditions"][2]["status"] = "False"
    waiting = {"state": {"waiting": {"reason": "PodInitializing"}}, "ready": False, "restartCount": 0}
    stuck["initContainerStatuses"] = [{"name": "model", **waiting}]
    stuck["containerStatuses"] = [{"name": "engine", **waiting}]
    world.kube.set_status(PODS, NS, "m-0", stuck)
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "e1"},
        "type": "Warning",
        "reason": "FailedMount",
        "note": 'MountVolume.SetUp failed for volume "api-keys" : secret "api-keys" not found',
        "eventTime": "2026-01-01T00:00:01.000000Z",
        "regarding": {"kind": "Pod", "name": "m-0", "namespace": NS, "uid": pod["metadata"]["uid"]},
    }
    world.kube.put(event)
    assert await world.look() is not None
    assert world.condition("Ready")[1] == "NoReadyReplicas", "it may still be on its way"
    world.later(6)
    await world.look()
    assert world.condition("Ready") == ("False", "SecretNotFound", 'm-0: Secret "api-keys" does not exist')
    assert ("Warning", "SecretNotFound", 'm-0: Secret "api-keys" does not exist') in world.kube.events()
    world.kube.forget_requests()
    world.later(1)
    await world.look()
    assert [r.verb for r in world.kube.store.requests] == [], "events are read every ten seconds at most"


async def test_a_quota_is_named_from_the_sets_events() -> None:
    world = World()
    world.model()
    await world.look()
    owner = world.stateful_set()["metadata"]
    note = 'create Pod m-0 in StatefulSet m failed error: pods "m-0" is forbidden: exceeded quota: gpus'
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "e1"},
        "type": "Warning",
        "reason": "FailedCreate",
        "note": note,
        "deprecatedLastTimestamp": "2026-01-01T00:00:01Z",
        "regarding": {"kind": "StatefulSet", "name": "m", "namespace": NS, "uid": owner["uid"]},
    }
    world.kube.put(event)
    world.later(6)
    again = await world.look()
    assert world.condition("Ready")[:2] == ("False", "QuotaExceeded")
    assert "exceeded quota: gpus" in world.condition("Ready")[2]
    assert again is not None
    assert again <= 5


async def test_the_tenant_key_is_made_once_and_never_read() -> None:
    world = World()
    world.model()
    await world.steady()
    (secret,) = world.kube.all(SECRETS)
    assert secret["metadata"]["name"] == "engram-tenant-key"
    assert "ownerReferences" not in secret["metadata"]
    world.model("other")
    await world.steady("other")
    assert world.kube.all(SECRETS) == [secret]
    # lost: a person restores it; a new one would make what is stored unreadable
    world.kube.remove(SECRETS, NS, "engram-tenant-key")
    await world.steady()
    assert world.kube.all(SECRETS) == []
    assert {r.verb for r in world.kube.store.requests if r.kind == SECRETS} == {"create"}


@pytest.mark.parametrize("spec", [{"snapshots": {"enabled": False}}, None])
async def test_no_key_where_none_is_used(spec: dict[str, Any] | None) -> None:
    world = World()
    if spec is None:
        world.policy(keySecretRef={"name": "ours"})
    world.model(**(spec or {}))
    await world.steady()
    assert world.kube.all(SECRETS) == []
