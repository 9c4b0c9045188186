"""What a user wants of a model: the resource and its policy as typed values, or why they cannot be honoured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engram_operator.builders import BuildSettings, desired
from engram_operator.controllers.rollout import inputs_of
from engram_operator.errors import ResourceError
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Object
from engram_operator.kube.errors import Invalid, KubeError, ServerFailed
from engram_operator.kube.kinds import POLICIES
from engram_operator.resources import EngramModel, Schemas, SnapshotPolicy
from engram_operator.resources.documents import DEFAULT_POLICY
from engram_operator.status import Refusal


@dataclass(frozen=True, slots=True)
class Intent:
    """`objects`: what should exist. `inputs`: hash of what users wrote that reaches the pods."""

    model: EngramModel
    policy: SnapshotPolicy | None
    objects: list[Object]
    inputs: str


class Unwanted(Exception):
    """The spec cannot be in force."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.message)


def read_intent(model: Object, cache: Cache, schemas: Schemas, build: BuildSettings) -> Intent:
    """Unwanted with the first reason why not."""
    try:
        parsed = EngramModel.parse(schemas.defaulted(model))
    except ResourceError as error:
        raise Unwanted(Refusal(_reason(error), str(error))) from error
    except (KeyError, TypeError, AttributeError) as error:
        text = f"the resource does not have the shape this operator knows: {type(error).__name__} {error}"
        raise Unwanted(Refusal("InvalidSpec", text)) from error
    policy_object = _policy_object(parsed, cache)
    policy = None
    if policy_object is not None and parsed.snapshots.enabled:
        name = policy_object["metadata"]["name"]
        try:
            policy_object = schemas.defaulted(policy_object)
            policy = SnapshotPolicy.parse(policy_object)
        except ResourceError as error:
            raise Unwanted(Refusal("InvalidPolicy", f'SnapshotPolicy "{name}": {error}')) from error
        if policy.storage.uri.scheme == "file":
            text = (
                f'SnapshotPolicy "{name}": spec.storage.uri: {policy.storage.uri.text} is for the local mode: a pod has'
                " no disk that outlives it; use s3:// or pvc://"
            )
            raise Unwanted(Refusal("StoreNotUsable", text))
    try:
        objects = desired(parsed, policy, build)
    except ResourceError as error:
        raise Unwanted(Refusal(_reason(error), str(error))) from error
    used = policy_object if policy is not None else None
    inputs = inputs_of(model, used, schemas.schema("EngramModel"), schemas.schema("SnapshotPolicy"))
    return Intent(parsed, policy, objects, inputs)


def _policy_object(model: EngramModel, cache: Cache) -> Object | None:
    wanted = model.snapshots.policy
    found = cache.get(POLICIES, model.namespace, wanted or DEFAULT_POLICY)
    if wanted is not None and found is None and model.snapshots.enabled:
        there = ", ".join(sorted(p["metadata"]["name"] for p in cache.list(POLICIES, model.namespace))) or "none"
        text = (
            f'spec.snapshots.policyRef.name: no SnapshotPolicy "{wanted}" in namespace {model.namespace};'
            f" there is: {there}"
        )
        raise Unwanted(Refusal("PolicyNotFound", text))
    return found


def _reason(error: ResourceError) -> str:
    first = error.problems[0] if error.problems else ""
    for prefix, reason in (
        ("spec.model.uri", "InvalidModelURI"),
        ("spec.podTemplate", "InvalidPodTemplate"),
        ("spec.parallelism", "UnsupportedParallelism"),
        ("spec.engine.args", "InvalidEngineArgs"),
        ("SnapshotPolicy", "InvalidPolicy"),
    ):
        if first.startswith(prefix):
            return reason
    return "InvalidSpec"


def refused_by_server(error: KubeError, obj: Mapping[str, object], model: EngramModel) -> Refusal:
    """The API server's judgement of an object, in the terms of the resource that it was made from."""
    if isinstance(error, ServerFailed):
        # The local port of a connection to a webhook is another each time: a status that is written each time.
        words = re.sub(r":\d+->", "->", error.message)
        return Refusal("ServerFailed", f"the API server fails over {obj['kind']}: {words}")
    if not isinstance(error, Invalid):
        return Refusal("Forbidden", f"the API server refuses {obj['kind']}: {error.message}")
    if obj["kind"] != "StatefulSet":
        return Refusal("InvalidSpec", error.message)
    message = error.message
    if model.pod_template and "spec.template." in message:
        message = message.replace("spec.template.", "spec.podTemplate.")
        return Refusal("InvalidPodTemplate", f"{message} (spec.podTemplate is merged over the operator's pod)")
    return Refusal("InvalidPodTemplate" if model.pod_template else "InvalidSpec", message)
