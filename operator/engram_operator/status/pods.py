"""What keeps a pod from serving, in the words of whoever knows: scheduler, kubelet, the container itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from engram_operator.builders.settings import ENGINE, MODEL_INIT
from engram_operator.status.redact import redact

Object = Mapping[str, Any]
Stage = Literal["Accepted", "Scheduled", "ModelCached", "Available"]
STAGES: tuple[Stage, ...] = ("Accepted", "Scheduled", "ModelCached", "Available")

_NOT_FOUND = re.compile(r"(secret|configmap|persistentvolumeclaim|serviceaccount)s? \"?([\w./-]+)\"? not found", re.I)
_KEY_MISSING = re.compile(r"couldn't find key (\S+) in (Secret|ConfigMap) (\S+)", re.I)
_KEYS_MISSING = re.compile(r"references non-existent (secret|config) key: (\S+)", re.I)
_EXTENDED = re.compile(r"Insufficient [\w.-]+/")
_IMAGE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
     "RegistryUnavailable", "SignatureValidationFailed"}
)  # fmt: skip
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreStartHookError"})
_SETTLING = frozenset({"ContainerCreating", "PodInitializing", ""})


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod does not serve. `passing`: it goes by without anybody, such as a model that still loads."""

    stage: Stage
    reason: str
    message: str
    passing: bool = False


def condition(obj: Object, name: str) -> Object:
    """A condition of an object, {} when it has none of that type."""
    for entry in (obj.get("status") or {}).get("conditions") or ():
        if entry.get("type") == name:
            return entry  # type: ignore[no-any-return]
    return {}


def is_ready(pod: Object) -> bool:
    """Ready, and not on its way out."""
    return condition(pod, "Ready").get("status") == "True" and not pod["metadata"].get("deletionTimestamp")


def is_terminating(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_lost(pod: Object) -> bool:
    """Its node went away: said by the pod itself, so no right on nodes is needed to know it."""
    return _lost(pod) and is_terminating(pod)


def _lost(pod: Object) -> bool:
    found = condition(pod, "DisruptionTarget")
    return found.get("status") == "True" and found.get("reason") == "DeletionByTaintManager"


def container_status(pod: Object, name: str) -> Object:
    """Status of a container, of either kind; {} before the kubelet has said anything."""
    status = pod.get("status") or {}
    for entry in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if entry.get("name") == name:
            return entry  # type: ignore[no-any-return]
    return {}


def ordinal(pod: Object) -> int:
    """Position in the StatefulSet; names that have none come last."""
    tail = str(pod["metadata"]["name"]).rpartition("-")[2]
    return int(tail) if tail.isdigit() else 1 << 30


def parse_time(text: Any) -> datetime | None:
    """An API time; None for what is none."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None


def last_progress(pod: Object) -> Iterator[datetime]:
    """Moments at which the pod came further."""
    times = [pod["metadata"].get("creationTimestamp")]
    times += [entry.get("lastTransitionTime") for entry in (pod.get("status") or {}).get("conditions") or ()]
    for text in times:
        if (found := parse_time(text)) is not None and found.tzinfo is not None:
            yield found


def diagnose(pod: Object, warnings: Sequence[str] = ()) -> Trouble | None:
    """What keeps this pod from being Ready; None when it is. `warnings`: notes of its Warning events, newest last."""
    name = pod["metadata"]["name"]
    if is_ready(pod):
        return None
    found = _diagnose(pod, [note for note in warnings if note])
    return Trouble(found.stage, found.reason, f"{name}: {found.message}", found.passing)


def _diagnose(pod: Object, warnings: Sequence[str]) -> Trouble:
    status = pod.get("status") or {}
    if is_terminating(pod):
        if _lost(pod):
            return Trouble(
                "Available",
                "NodeLost",
                redact(
                    f"node lost: {condition(pod, 'DisruptionTarget')['message']}"
                    if condition(pod, "DisruptionTarget").get("message")
                    else "its node is lost"
                ),
            )
        return Trouble("Available", "Terminating", "finishes its turns and ends", passing=True)
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _unscheduled(str(scheduled.get("reason") or ""), str(scheduled.get("message") or ""), warnings)
    if status.get("phase") == "Failed":
        reason = str(status.get("reason") or "PodFailed")
        return Trouble("Available", _word(reason), redact(str(status.get("message") or reason)))
    for entry in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if (trouble := _container(entry, warnings)) is not None:
            return trouble
    if warnings and not _started(pod):
        return _event(warnings[-1])
    engine = container_status(pod, ENGINE)
    if engine.get("started") and "running" in (engine.get("state") or {}):
        probes = [note for note in warnings if "probe" in note.lower()]
        said = f": {redact(probes[-1])}" if probes else ""
        return Trouble("Available", "NotReady", f"the engine runs and is not ready{said}", passing=not probes)
    return Trouble("Available", "Loading", _loading(pod, engine), passing=True)


def _loading(pod: Object, engine: Object) -> str:
    if "running" in (engine.get("state") or {}):
        return "the engine loads the model"
    if "running" in (container_status(pod, MODEL_INIT).get("state") or {}):
        return "the weights are fetched or checked"
    return "the pod is being started" if condition(pod, "PodScheduled") else "waits for the scheduler"


def _started(pod: Object) -> bool:
    """True once any container of the pod has run: then its events are not about mounting and pulling any more."""
    status = pod.get("status") or {}
    for entry in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if {"running", "terminated"} & set(entry.get("state") or {}):
            return True
    return False


def _unscheduled(reason: str, message: str, warnings: Sequence[str]) -> Trouble:
    text = redact(message or reason or "not scheduled")
    storage = [note for note in warnings if "storageclass" in note.lower()]
    if storage and "not found" in storage[-1].lower():
        return Trouble("Scheduled", "StorageClassNotFound", f"{text} ({redact(storage[-1])})")
    lowered = message.lower()
    if "persistentvolumeclaim" in lowered or "volume" in lowered:
        notes = f" ({redact(warnings[-1])})" if warnings else ""
        return Trouble("Scheduled", "VolumeNotBound", text + notes)
    if _EXTENDED.search(message):
        return Trouble("Scheduled", "InsufficientGPU", text)
    if "Insufficient" in message:
        return Trouble("Scheduled", "InsufficientResources", text)
    if reason == "SchedulingGated":
        return Trouble("Scheduled", "SchedulingGated", text, passing=True)
    return Trouble("Scheduled", "NoMatchingNode", text)


def _container(entry: Object, warnings: Sequence[str]) -> Trouble | None:
    name, state = str(entry.get("name")), entry.get("state") or {}
    restarts = int(entry.get("restartCount") or 0)
    if (waiting := state.get("waiting")) is not None:
        reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        if reason in _IMAGE:
            # The back-off message alone names the image; the kubelet's event says why.
            why = next((note for note in reversed(warnings) if "pull" in note.lower() and len(note) > len(message)), "")
            image = f"image {entry.get('image')}: " if entry.get("image") and str(entry["image"]) not in message else ""
            shown = "ImagePullBackOff" if reason == "ErrImagePull" else reason
            return Trouble("Available", shown, f"container {name}: {image}{redact(why or message or reason)}")
        if reason in _CONFIG:
            return _missing(message) or Trouble("Available", reason, f"container {name}: {redact(message)}")
        last = (entry.get("lastState") or {}).get("terminated")
        if last is not None and reason not in _SETTLING:
            return _ended(name, last, restarts, backing_off=True)
        if reason in _SETTLING:
            return None
        return Trouble("Available", _word(reason), f"container {name}: {redact(message or reason)}")
    ended = state.get("terminated")
    if ended is not None:
        return None if ended.get("exitCode") == 0 and name != ENGINE else _ended(name, ended, restarts)
    last = (entry.get("lastState") or {}).get("terminated")
    # It runs again after it ended badly: until it is ready, how it ended is what a person wants to know.
    if last is not None and last.get("exitCode") != 0 and not entry.get("ready"):
        return _ended(name, last, restarts, running=True)
    return None


def _ended(name: str, ended: Object, restarts: int, *, backing_off: bool = False, running: bool = False) -> Trouble:
    code, why = ended.get("exitCode"), str(ended.get("reason") or "")
    said = redact(str(ended.get("message") or ""))
    how = f"exit code {code}" + (f" ({why})" if why not in ("", "Error", "Completed") else "")
    count = f", {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
    message = f"container {name}: {how}{count}" + (f": {said}" if said else "")
    if name == MODEL_INIT:
        full = re.search(r"no ?space|ENOSPC|disk quota", said, re.I)
        return Trouble("ModelCached", "NoSpace" if full else "DownloadFailed", message)
    if why == "OOMKilled":
        return Trouble("Available", "OOMKilled", message)
    return Trouble("Available", "CrashLoopBackOff" if backing_off or restarts else "ContainerExited", message, running)


def _missing(message: str) -> Trouble | None:
    """A Secret or ConfigMap that is not there, or lacks a key, named."""
    if (found := _NOT_FOUND.search(message)) is not None:
        kind = {"secret": "Secret", "configmap": "ConfigMap", "persistentvolumeclaim": "PersistentVolumeClaim",
                "serviceaccount": "ServiceAccount"}[found[1].lower()]  # fmt: skip
        if kind == "PersistentVolumeClaim":
            return Trouble("Scheduled", "VolumeNotBound", f'{kind} "{found[2]}" does not exist')
        reason = f"{kind}NotFound"
        return Trouble("Accepted", reason, f'{kind} "{found[2].rpartition("/")[2]}" does not exist')
    if (found := _KEY_MISSING.search(message)) is not None:
        kind = "Secret" if found[2].lower() == "secret" else "ConfigMap"
        return Trouble("Accepted", f"{kind}NotFound", f'{kind} "{found[3].rpartition("/")[2]}" has no key "{found[1]}"')
    if (found := _KEYS_MISSING.search(message)) is not None:
        kind = "Secret" if found[1].lower() == "secret" else "ConfigMap"
        return Trouble("Accepted", f"{kind}NotFound", f'a {kind} has no key "{found[2]}": {redact(message)}')
    return None


def _event(note: str) -> Trouble:
    """From an event, for what no container status says: volumes are mounted before there is a container."""
    if (missing := _missing(note)) is not None:
        return missing
    if "Multi-Attach" in note or "attach" in note.lower():
        return Trouble("Available", "VolumeNotAttached", redact(note))
    if "mount" in note.lower():
        return Trouble("Available", "VolumeNotMounted", redact(note))
    return Trouble("Available", "PodNotStarted", redact(note))


def worst(troubles: Iterable[Trouble]) -> Trouble | None:
    """The one to show: what a person must act on first, then by stage; how many others there are is added."""
    found = sorted(enumerate(troubles), key=lambda item: (item[1].passing, STAGES.index(item[1].stage), item[0]))
    if not found:
        return None
    first = found[0][1]
    others = sum(1 for _, item in found[1:] if not item.passing)
    if not others:
        return first
    also = f" (and {others} other pod{'s' if others > 1 else ''})"
    return Trouble(first.stage, first.reason, first.message + also, first.passing)


def _word(text: str) -> str:
    """Fit for a condition's reason."""
    word = re.sub(r"[^A-Za-z0-9]", "", text)
    return word if word[:1].isalpha() else "Unknown"
