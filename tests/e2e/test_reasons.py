"""What goes wrong on a real cluster, and what `kubectl get` and the conditions say about it then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e import resources
from tests.e2e.cluster.client import Client, Object, condition
from tests.e2e.conftest import new_namespace

SECONDS = 120


@dataclass(frozen=True, slots=True)
class Wrong:
    """A model that cannot serve. `kind`: the condition that says why; `said`: words a person needs, in its message."""

    name: str
    spec: dict[str, Any]
    kind: str
    reason: str
    said: tuple[str, ...]


GPU = {"accelerator": {"resourceName": "nvidia.com/gpu"}}
WRONG = (
    Wrong("no-folder", {"model": {"uri": "file:///models/none"}}, "ModelCached", "DownloadFailed", ("/models/none",)),
    Wrong("no-gpu", GPU, "Scheduled", "InsufficientGPU", ("nvidia.com/gpu",)),
    Wrong("no-secret", {"auth": {"apiKeysSecretRef": {"name": "absent"}}}, "Accepted", "SecretNotFound", ("absent",)),
    Wrong(
        "no-image",
        {"engine": {"image": "engram.test/none:1", "imagePullPolicy": "IfNotPresent"}},
        "Available",
        "ImagePullBackOff",
        ("engram.test/none:1",),
    ),
    Wrong("bad-flag", {"engine": {"args": ["--no-such-flag"]}}, "Available", "CrashLoopBackOff", ("--no-such-flag",)),
)


@pytest.fixture(scope="module")
def wrong_models(kube: Client, operator: str, tiny_model: str) -> Iterator[str]:
    """All of them at once: they wait for their reasons side by side."""
    with new_namespace(kube, "reasons") as namespace:
        models = [resources.model(wrong.name, tiny_model, **wrong.spec) for wrong in WRONG]
        kube.apply(*models, namespace=namespace)
        yield namespace


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_condition_says_what_is_wrong(kube: Client, wrong_models: str, wrong: Wrong) -> None:
    def told() -> Object | None:
        found = condition(kube.custom("engrammodels", wrong_models, wrong.name), wrong.kind)
        return found if found.get("reason") == wrong.reason else None

    def seen() -> str:
        return str((kube.custom("engrammodels", wrong_models, wrong.name) or {}).get("status"))

    try:
        found = kube.until(f"{wrong.kind} says {wrong.reason}", told, SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}\nstatus: {seen()}") from error
    assert found["status"] == "False"
    for words in wrong.said:
        assert words in found["message"]
    ready = condition(kube.custom("engrammodels", wrong_models, wrong.name), "Ready")
    assert ready["status"] == "False"
    assert ready["reason"] == wrong.reason


def test_a_missing_secret_that_arrives_is_enough(kube: Client, wrong_models: str) -> None:
    keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "absent"}, "stringData": {"someone": "a" * 40}}
    kube.apply(keys, namespace=wrong_models)
    kube.wait("engrammodel/no-secret", "condition=Ready", wrong_models, 240)
