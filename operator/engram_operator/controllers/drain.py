"""The end of a model: its pods finish their turns and save what they hold before the objects go.

A finalizer holds the resource meanwhile, never longer than the drain may take: a resource that cannot be deleted is
worse than a turn cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from engram_operator.builders.pod import GRACE_SECONDS
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import Conflict, NotFound
from engram_operator.kube.kinds import MODELS, STATEFULSETS
from engram_operator.status.pods import parse_time

FINALIZER = "engram.dev/drain"
SLACK_SECONDS = 30.0
_DEFAULT_DRAIN_SECONDS = 120


async def ensure_finalizer(kube: Kube, model: Object) -> bool:
    """True when it is there; False when another writer was faster, so the model must be read again."""
    if FINALIZER in (model["metadata"].get("finalizers") or ()):
        return True
    return await _write(kube, model, [*(model["metadata"].get("finalizers") or ()), FINALIZER])


async def drop_finalizer(kube: Kube, model: Object) -> bool:
    """As ensure_finalizer, the other way."""
    finalizers = list(model["metadata"].get("finalizers") or ())
    if FINALIZER not in finalizers:
        return True
    return await _write(kube, model, [name for name in finalizers if name != FINALIZER])


async def _write(kube: Kube, model: Object, finalizers: list[str]) -> bool:
    metadata = model["metadata"]
    patch = {"metadata": {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}}
    try:
        await kube.merge_patch(MODELS, metadata["name"], metadata["namespace"], patch)
    except NotFound:
        return True
    except Conflict:
        return False
    return True


async def stop_pods(kube: Kube, stateful_set: Object | None) -> None:
    """Scale to zero. A patch and not an apply: what the resource says may not even be readable any more."""
    if stateful_set is None or stateful_set["spec"].get("replicas") == 0:
        return
    metadata = stateful_set["metadata"]
    if metadata.get("deletionTimestamp"):
        return
    try:
        await kube.merge_patch(STATEFULSETS, metadata["name"], metadata["namespace"], {"spec": {"replicas": 0}})
    except NotFound:
        return


def seconds_left(model: Object, pods: Sequence[Object], now: datetime) -> float:
    """How long the drain may still take; 0 when nothing is left to wait for."""
    if not pods:
        return 0.0
    began = parse_time(model["metadata"].get("deletionTimestamp")) or now
    update = (model.get("spec") or {}).get("updateStrategy") or {}
    drain = int(update.get("drainTimeoutSeconds", _DEFAULT_DRAIN_SECONDS))
    end = began + timedelta(seconds=drain + GRACE_SECONDS + SLACK_SECONDS)
    return max(0.0, (end - now).total_seconds())
