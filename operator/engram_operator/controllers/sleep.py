"""Scale to zero and back: which of its stages a model is in, decided anew from what is there at every look.

    Awake -> Falling: idle long enough; the Service already points at the activator, the pods still run
    Falling -> Asleep: still idle a moment later, so no request took the old way; no pods
    Asleep -> Waking: the activator holds a request; pods come, the Service still points at the activator
    Waking -> Awake: a pod is ready; the Service points at the pods

Going back is always safe: the activator hands on to ready pods by itself. Nothing is remembered outside the cluster,
so an operator that dies in between goes on where it was.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from engram_operator.builders import naming
from engram_operator.kube.client import Object
from engram_operator.resources import EngramModel

ASLEEP = "engram.dev/asleep"  # on the StatefulSet
ROUTED = "engram.dev/routed-since"  # on the Service, Unix seconds
SETTLE_SECONDS = 3.0  # until every node sends new connections to the activator
ASK_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 30.0


class Stage(enum.Enum):
    AWAKE = "Awake"
    FALLING = "Falling"
    ASLEEP = "Asleep"
    WAKING = "Waking"

    @property
    def routed(self) -> bool:
        """Whether the Service points at the activator."""
        return self is not Stage.AWAKE


@dataclass(frozen=True, slots=True)
class Seen:
    """What decides. `idle`: seconds since the last request of any replica, None when one did not say, or works.
    `held`: requests that the activator holds for the model, None when it did not say. `now`: Unix seconds."""

    stateful_set: Object | None
    service: Object | None
    ready: int
    idle: float | None
    held: int | None
    activator_ready: bool
    now: float


def may_sleep(model: EngramModel) -> bool:
    return model.idle_seconds is not None and not model.suspend and model.replicas > 0


def is_asleep(stateful_set: Mapping[str, object] | None) -> bool:
    metadata = (stateful_set or {}).get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    return bool(annotations) and isinstance(annotations, Mapping) and annotations.get(ASLEEP) == "true"


def is_routed(service: Object | None) -> bool:
    """Whether this Service points at the activator."""
    selector = ((service or {}).get("spec") or {}).get("selector") or {}
    return bool(naming.activator_selector().items() <= selector.items())


def stage(model: EngramModel, seen: Seen) -> Stage:
    """Pure; see the module's table."""
    if not may_sleep(model) or seen.stateful_set is None:
        return Stage.AWAKE
    if is_asleep(seen.stateful_set):
        return Stage.WAKING if seen.held else Stage.ASLEEP
    assert model.idle_seconds is not None
    idle = seen.idle is not None and seen.idle >= model.idle_seconds
    if is_routed(seen.service):
        if not seen.ready:
            return Stage.WAKING
        if not idle or seen.held or not seen.activator_ready:
            return Stage.AWAKE
        settled = seen.held == 0 and seen.now - routed_since(seen.service, seen.now) >= SETTLE_SECONDS
        return Stage.ASLEEP if settled else Stage.FALLING
    return Stage.FALLING if idle and seen.ready and seen.activator_ready else Stage.AWAKE


def routed_since(service: Object | None, now: float) -> float:
    """When the Service was pointed at the activator; `now` when it does not say."""
    text = (((service or {}).get("metadata") or {}).get("annotations") or {}).get(ROUTED) or ""
    return min(now, float(text)) if text.isdigit() else now


def look_again(model: EngramModel, now_in: Stage, idle: float | None) -> float | None:
    """Seconds until the stage may change by itself. Asleep: the activator is asked for all models of a namespace at
    once, by its own controller."""
    if not may_sleep(model) or now_in is Stage.ASLEEP:
        return None
    if now_in in (Stage.FALLING, Stage.WAKING):
        return ASK_SECONDS
    assert model.idle_seconds is not None
    if idle is None:
        return LONGEST_WAIT_SECONDS
    return min(LONGEST_WAIT_SECONDS, max(ASK_SECONDS, model.idle_seconds - idle + 0.5))


def put_to(
    objects: list[Object], model: EngramModel, now_in: Stage, service: Object | None, now: datetime
) -> list[Object]:
    """The model's objects with what this stage changes in them. `service`: the live one."""
    result = []
    for obj in objects:
        if now_in.routed and obj["kind"] == "Service" and obj["metadata"]["name"] == model.name:
            obj = copy.deepcopy(obj)
            obj["spec"]["selector"] = naming.activator_selector()
            since = routed_since(service, now.timestamp()) if is_routed(service) else now.timestamp()
            obj["metadata"]["annotations"][ROUTED] = str(int(since))
        if now_in is Stage.ASLEEP and obj["kind"] == "StatefulSet":
            obj = copy.deepcopy(obj)
            obj["spec"]["replicas"] = 0
            obj["metadata"]["annotations"][ASLEEP] = "true"
        result.append(obj)
    return result
