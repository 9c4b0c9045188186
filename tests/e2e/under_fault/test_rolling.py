"""Two replicas change under load: a user's change rolls them, an operator upgrade does not, and nobody notices."""

from __future__ import annotations

import json

from tests.e2e.cluster.client import Client, Object, condition
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.conftest import Images, install_operator
from tests.e2e.under_fault.conftest import INTRODUCTION, MODEL, READY_SECONDS, Served

REVISION = "controller-revision-hash"
OTHER_ENGINE = "engram.test/engine:newer"


def uids(pods: dict[str, Object]) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in pods.items()}


def change(kube: Client, served: Served, value: str) -> None:
    """One that users make: the engine's environment."""
    env = [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "CHANGED", "value": value}]
    patch = json.dumps({"spec": {"engine": {"env": env}}})
    kube.kubectl("patch", "engrammodel", MODEL, "--type=merge", "-p", patch, namespace=served.namespace)


def test_a_rolling_update_under_load_fails_no_request(cluster: Cluster, served: Served) -> None:
    before = uids(served.settle())
    history: list[dict[str, str]] = []
    (first,) = served.application.say(MODEL, f"Good morning. {INTRODUCTION}", history=history)

    def rolled() -> dict[str, Object] | None:
        serving = served.ready()
        new = [name for name, pod in serving.items() if pod["metadata"]["uid"] != before[name]]
        return serving if len(new) == 2 else None

    with served.caller.load(MODEL) as load:
        change(cluster, served, "once")
        after = cluster.until("both replicas are replaced", rolled, READY_SECONDS)
    served.settle()

    assert load.failed == []
    assert load.answered > 50
    assert len({pod["metadata"]["labels"][REVISION] for pod in after.values()}) == 1
    (second,) = served.application.say(MODEL, "And in which season was that?", history=history)
    assert not second.engram.get("restore_failed")
    assert second.engram["restored_tokens"] >= first.prompt_tokens
    assert second.engram["restored_tokens"] + second.engram["prefilled_tokens"] == second.prompt_tokens


def test_an_operator_upgrade_restarts_no_model(cluster: Cluster, images: Images, served: Served) -> None:
    before = served.settle()

    def up_to_date(status: str) -> Object | None:
        found = condition(cluster.custom("engrammodels", served.namespace, MODEL), "UpToDate")
        return found if found.get("status") == status else None

    cluster.until("the model is up to date", lambda: up_to_date("True"), 30)
    with served.caller.load(MODEL) as load:
        install_operator(cluster, Images(images.operator, OTHER_ENGINE))
        try:
            waiting = cluster.until("an upgrade waits", lambda: up_to_date("False"), 60)
        finally:
            install_operator(cluster, images)
    cluster.until("nothing waits", lambda: up_to_date("True"), 60)

    assert OTHER_ENGINE in waiting["message"]
    assert load.failed == []
    assert load.answered > 20
    assert uids(served.settle()) == uids(before)
    restarts = [status["restartCount"] for pod in before.values() for status in pod["status"]["containerStatuses"]]
    after = [status["restartCount"] for pod in served.pods().values() for status in pod["status"]["containerStatuses"]]
    assert after == restarts
