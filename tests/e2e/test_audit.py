"""What the API server's audit log says of the operator: it used every right it has, read no Secret, and wrote nothing
where nothing happened.

The first test of a run sets a namespace up; it is left alone while other tests, maybe of other processes, work in
theirs; then its writes are counted. The other tests read the log of the whole run, at its end.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from engram_operator.kube.rights import CANARY_RIGHTS, LEASE_RIGHTS, RIGHTS
from tests.e2e import resources
from tests.e2e.caller import Caller
from tests.e2e.cluster.audit import AuditLog, service_account
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.conftest import OPERATOR_NAMESPACE, RESTRICTED, Images, ObjectStore

API = "/apis/engram.dev/v1alpha1"
MODEL = "still"
READY_SECONDS = 240
OPERATOR = service_account(OPERATOR_NAMESPACE, "engram-operator")
UNINSTALL = service_account(OPERATOR_NAMESPACE, "engram-operator-uninstall")
SETTLE_SECONDS = 120  # a store is counted once a minute, and its count told in the status
IDLE_SECONDS = 180
# OwnerReferencesPermissionEnforcement asks for it when a child blocks its model's end, and logs nothing.
UNLOGGED = {("engram.dev", "engrammodels/finalizers", "update")}
HOOK = {
    ("apps", "deployments", "patch"),
    ("", "pods", "list"),
    *((("engram.dev", kind, verb)) for kind in ("engrammodels", "snapshots") for verb in ("list", "patch")),
}


@pytest.mark.stage("settle")
def test_a_namespace_is_set_up_and_left_alone(
    cluster: Cluster, images: Images, operator: str, object_store: ObjectStore, tiny_model: str
) -> None:
    """A model with a policy, a conversation and its Snapshot."""
    name = f"still-{secrets.token_hex(2)}"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})
    policy = resources.policy(object_store, object_store.bucket())
    cluster.apply(object_store.secret(), policy, resources.model(MODEL, tiny_model), namespace=name)
    caller = Caller.start(cluster, images.engine, name)
    caller.wait_for(MODEL, READY_SECONDS)
    answer = caller.chat(MODEL, "Good night.", conversation="still")
    assert answer.status == 200, answer.text
    cluster.until("a Snapshot", lambda: cluster.objects(f"{API}/namespaces/{name}/snapshots"), 60)
    note(cluster).write_text(json.dumps({"namespace": name, "since": datetime.now(UTC).isoformat()}))


@pytest.mark.stage("rest")
def test_nothing_is_written_where_nothing_happens(cluster: Cluster, audit: AuditLog) -> None:
    if not note(cluster).exists():
        pytest.skip("the namespace is set up by the test before: run the whole file")
    found = json.loads(note(cluster).read_text())
    namespace = found["namespace"]
    settled = datetime.fromisoformat(found["since"]) + timedelta(seconds=SETTLE_SECONDS)
    end = settled + timedelta(seconds=IDLE_SECONDS)
    time.sleep(max(0.0, (end - datetime.now(UTC)).total_seconds()))

    written = [entry for entry in audit.writes(0, OPERATOR) if entry.namespace == namespace]

    assert written, "it wrote what was needed in the beginning"
    assert [entry for entry in written if datetime.fromisoformat(entry.time) > settled] == []
    model = cluster.custom("engrammodels", namespace, MODEL)
    assert model is not None
    assert model["status"]["phase"] == "Ready"
    assert model["status"]["readyReplicas"] == 1
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    note(cluster).unlink()


def note(cluster: Cluster) -> Path:
    """Which namespace is left alone, and since when."""
    return cluster.layout.root / "still.json"


@pytest.fixture
def whole_run(cluster: Cluster) -> None:
    """Some rights are used by one test alone."""
    ran = {name.partition("::")[0] for name in cluster.passed()}
    here = Path(__file__).parent
    files = {f"tests/e2e/{path.relative_to(here)}" for path in here.rglob("test_*.py")}
    if left := files - ran:
        pytest.skip(f"needs a run of all end-to-end tests; not on this cluster yet: {', '.join(sorted(left))}")


@pytest.mark.stage("audit")
def test_every_right_of_the_operator_was_used(audit: AuditLog, whole_run: None) -> None:
    tables = (RIGHTS, LEASE_RIGHTS, CANARY_RIGHTS)
    granted = {(*place, verb) for table in tables for place, verbs in table.items() for verb in verbs}
    assert granted - audit.used(OPERATOR) - UNLOGGED == set()


@pytest.mark.stage("audit")
def test_every_right_of_the_hook_before_uninstalling_was_used(audit: AuditLog, whole_run: None) -> None:
    assert audit.used(UNINSTALL) == HOOK


@pytest.mark.stage("audit")
def test_nothing_was_refused(cluster: Cluster, audit: AuditLog, operator: str) -> None:
    refused = [entry for entry in audit.refused(OPERATOR) if not cluster.was_out(datetime.fromisoformat(entry.time))]
    assert refused == []


@pytest.mark.stage("audit")
def test_no_secret_was_read(audit: AuditLog, operator: str) -> None:
    """Made, for the tenant key; kubelets read what pods mount."""
    verbs = {entry.verb for entry in audit.entries(user=OPERATOR) if entry.resource.partition("/")[0] == "secrets"}
    assert verbs == {"create"}
