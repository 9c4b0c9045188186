"""One model of two replicas for all the faults: starting engines is what takes the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e import resources
from tests.e2e.application import Application
from tests.e2e.caller import Caller
from tests.e2e.cluster.client import Client, Object, condition
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.conftest import Images, ObjectStore, new_namespace

MODEL = "steady"
READY_SECONDS = 300
ENGINE = {**resources.ENGINE, "maxModelLen": 3072}
# Long enough that computing it again would be seen in the count.
INTRODUCTION = (
    "My name is Ada and I keep bees behind my house. Every spring I look at each hive, count the frames with brood, "
    "note the weather, and write down how much honey was left after the winter. Last year the third hive was best."
)


@dataclass(frozen=True, slots=True)
class Served:
    """A model of two replicas whose turns are in a bucket. Application and caller are on the first node, which is
    never lost; no rights but the application's."""

    kube: Client
    namespace: str
    bucket: str
    application: Application
    caller: Caller

    def pods(self) -> dict[str, Object]:
        """The engines' pods by name, those that are ending too."""
        found = self.kube.pods(self.namespace, f"app.kubernetes.io/instance={MODEL}")
        return {pod["metadata"]["name"]: pod for pod in found}

    def ready(self) -> dict[str, Object]:
        return {name: pod for name, pod in self.pods().items() if is_serving(pod)}

    def settle(self, seconds: float = READY_SECONDS) -> dict[str, Object]:
        """Waits until both replicas serve and the status says so; returns their pods."""

        def settled() -> dict[str, Object] | None:
            model = self.kube.custom("engrammodels", self.namespace, MODEL) or {}
            ready, status = self.ready(), model.get("status") or {}
            seen = status.get("observedGeneration") == model.get("metadata", {}).get("generation")
            return ready if len(ready) == status.get("readyReplicas") == 2 and seen else None

        return self.kube.until("both replicas serve", settled, seconds)


def is_serving(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]


@pytest.fixture(scope="package")
def served(
    cluster: Cluster, images: Images, operator: str, object_store: ObjectStore, tiny_model: str
) -> Iterator[Served]:
    with new_namespace(cluster, "steady") as namespace:
        bucket = object_store.bucket()
        model = resources.model(MODEL, tiny_model, replicas=2, engine=ENGINE)
        cluster.apply(object_store.secret(), resources.policy(object_store, bucket), model, namespace=namespace)
        safe = cluster.nodes[0]
        application = Application(cluster, images.engine, namespace, node=safe)
        caller = Caller.start(cluster, images.engine, namespace, node=safe)
        found = Served(cluster, namespace, bucket, application, caller)
        found.settle()
        yield found
