"""Replicas by kubectl scale and by a HorizontalPodAutoscaler, and none at all until a request comes."""

from __future__ import annotations

import pytest

from tests.e2e import resources
from tests.e2e.caller import Caller
from tests.e2e.cluster.client import Client, Object, names
from tests.e2e.conftest import Images

MODEL = "scaled"
READY_SECONDS = 240
IDLE_SECONDS = 30
WAKE_SECONDS = 240


def scale(kube: Client, namespace: str, replicas: int) -> None:
    kube.kubectl("scale", f"engrammodel/{MODEL}", f"--replicas={replicas}", namespace=namespace)
    scaled(kube, namespace, replicas)


def scaled(kube: Client, namespace: str, replicas: int) -> None:
    labels = f"app.kubernetes.io/instance={MODEL}"
    kube.until(f"{replicas} pods", lambda: len(kube.pods(namespace, labels)) == replicas, READY_SECONDS)

    def reported() -> bool:
        status = (kube.custom("engrammodels", namespace, MODEL) or {}).get("status", {})
        return bool(status.get("readyReplicas", 0) == status.get("replicas", 0) == replicas)

    kube.until(f"{replicas} ready replicas in the status", reported, READY_SECONDS)


def autoscaler(fewest: int, most: int) -> Object:
    """The cluster measures no processors, so what acts are the bounds: read and written by way of `/scale`."""
    target = {"apiVersion": "engram.dev/v1alpha1", "kind": "EngramModel", "name": MODEL}
    metric = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": MODEL},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": fewest,
            "maxReplicas": most,
            "metrics": [{"type": "Resource", "resource": metric}],
        },
    }


@pytest.mark.timeout(1200)
def test_one_three_none_and_one_again(
    kube: Client, images: Images, operator: str, tiny_model: str, namespace: str
) -> None:
    kube.apply(resources.model(MODEL, tiny_model), namespace=namespace)
    caller = Caller.start(kube, images.engine, namespace)
    caller.wait_for(MODEL, READY_SECONDS)

    scale(kube, namespace, 3)
    assert names(kube.pods(namespace, f"app.kubernetes.io/instance={MODEL}")) == [f"{MODEL}-{i}" for i in range(3)]
    scale(kube, namespace, 0)
    assert kube.custom("engrammodels", namespace, MODEL)["status"]["phase"] == "Suspended"  # type: ignore[index]
    scale(kube, namespace, 1)
    caller.wait_for(MODEL, READY_SECONDS)

    answer = caller.chat(MODEL, "Are you back?", conversation="scaled")
    assert answer.status == 200, answer.text

    kube.apply(autoscaler(2, 4), namespace=namespace)
    scaled(kube, namespace, 2)
    kube.apply(autoscaler(1, 1), namespace=namespace)
    scaled(kube, namespace, 1)


@pytest.mark.timeout(1200)
def test_a_sleeping_model_wakes_for_a_request_that_waits(
    kube: Client, images: Images, operator: str, tiny_model: str, namespace: str
) -> None:
    kube.apply(resources.model(MODEL, tiny_model, scaleToZero={"idleSeconds": IDLE_SECONDS}), namespace=namespace)
    caller = Caller.start(kube, images.engine, namespace)
    caller.wait_for(MODEL, READY_SECONDS)
    labels = f"app.kubernetes.io/instance={MODEL}"

    def sleeps() -> bool:
        status = (kube.custom("engrammodels", namespace, MODEL) or {}).get("status", {})
        return status.get("phase") == "Idle" and not kube.pods(namespace, labels)

    kube.until("the model sleeps", sleeps, READY_SECONDS)
    answer = caller.chat(MODEL, "Wake up, please.", conversation="asleep", timeout=WAKE_SECONDS)

    assert answer.status == 200, answer.text
    assert names(kube.pods(namespace, labels)) == [f"{MODEL}-0"]
