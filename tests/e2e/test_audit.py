"""What the API server's audit log says of the operator: it used every right it has, read no Secret, and wrote nothing
where nothing happened.

The first test of a run sets a namespace up; it is left alone while other tests work in theirs; then its writes are
counted. The other tests read the log of the whole run, at its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from engram_operator.kube.rights import CANARY_RIGHTS, LEASE_RIGHTS, RIGHTS
from tests.e2e import resources
from tests.e2e.caller import Caller
from tests.e2e.cluster.audit import AuditLog, service_account
from tests.e2e.cluster.client import Client
from tests.e2e.conftest import OPERATOR_NAMESPACE, Images, ObjectStore, new_namespace

MODEL = "still"
READY_SECONDS = 240
OPERATOR = service_account(OPERATOR_NAMESPACE, "engram-operator")
UNINSTALL = service_account(OPERATOR_NAMESPACE, "engram-operator-uninstall")
SETTLE_SECONDS = 120  # a store is counted once a minute, and its count told in the status
IDLE_SECONDS = 180
# Admission asks for it when a child names its model as an owner, and writes no line in the log.
UNLOGGED = {("engram.dev", "engrammodels/finalizers", "update")}
HOOK = {
    ("apps", "deployments", "patch"),
    ("", "pods", "list"),
    *((("engram.dev", kind, verb)) for kind in ("engrammodels", "snapshots") for verb in ("list", "patch")),
}


@dataclass(slots=True)
class Still:
    """`since`: when the last thing happened there."""

    namespace: str
    since: datetime


@pytest.fixture(scope="session")  # other modules' tests come in between
def still(kube: Client, images: Images, operator: str, object_store: ObjectStore, tiny_model: str) -> Iterator[Still]:
    """A model with a policy, a conversation and its Snapshot."""
    with new_namespace(kube, "still") as namespace:
        policy = resources.policy(object_store, object_store.bucket())
        kube.apply(object_store.secret(), policy, resources.model(MODEL, tiny_model), namespace=namespace)
        caller = Caller.start(kube, images.engine, namespace)
        kube.wait(f"engrammodel/{MODEL}", "condition=Ready", namespace, READY_SECONDS)
        answer = caller.chat(MODEL, "Good night.", conversation="still")
        assert answer.status == 200, answer.text
        path = f"/apis/engram.dev/v1alpha1/namespaces/{namespace}/snapshots"
        kube.until("a Snapshot", lambda: kube.objects(path), 60)
        yield Still(namespace, datetime.now(UTC))


@pytest.mark.stage("settle")
def test_a_namespace_is_set_up_and_left_alone(kube: Client, still: Still) -> None:
    assert kube.custom("engrammodels", still.namespace, MODEL)["status"]["readyReplicas"] == 1  # type: ignore[index]


@pytest.mark.stage("rest")
def test_nothing_is_written_where_nothing_happens(kube: Client, audit: AuditLog, still: Still) -> None:
    settled = still.since + timedelta(seconds=SETTLE_SECONDS)
    end = settled + timedelta(seconds=IDLE_SECONDS)
    time.sleep(max(0.0, (end - datetime.now(UTC)).total_seconds()))

    written = [entry for entry in audit.writes(0, OPERATOR) if entry.namespace == still.namespace]

    assert written, "it wrote what was needed in the beginning"
    assert [entry for entry in written if datetime.fromisoformat(entry.time) > settled] == []
    model = kube.custom("engrammodels", still.namespace, MODEL)
    assert model is not None
    assert model["status"]["phase"] == "Ready"


@pytest.fixture
def whole_run(request: pytest.FixtureRequest) -> None:
    """Some rights are used by one test alone."""
    files = set(Path(__file__).parent.rglob("test_*.py"))
    if left := files - {item.path for item in request.session.items}:
        pytest.skip(f"needs a run of all end-to-end tests; not in this one: {', '.join(sorted(p.name for p in left))}")


@pytest.mark.stage("audit")
def test_every_right_of_the_operator_was_used(audit: AuditLog, whole_run: None) -> None:
    tables = (RIGHTS, LEASE_RIGHTS, CANARY_RIGHTS)
    granted = {(*place, verb) for table in tables for place, verbs in table.items() for verb in verbs}
    assert granted - audit.used(OPERATOR) - UNLOGGED == set()


@pytest.mark.stage("audit")
def test_every_right_of_the_hook_before_uninstalling_was_used(audit: AuditLog, whole_run: None) -> None:
    assert audit.used(UNINSTALL) == HOOK


@pytest.mark.stage("audit")
def test_nothing_was_refused(audit: AuditLog, operator: str) -> None:
    assert audit.refused(OPERATOR) == []


@pytest.mark.stage("audit")
def test_no_secret_was_read(audit: AuditLog, operator: str) -> None:
    """Made, for the tenant key; kubelets read what pods mount."""
    verbs = {entry.verb for entry in audit.entries(user=OPERATOR) if entry.resource.partition("/")[0] == "secrets"}
    assert verbs == {"create"}
