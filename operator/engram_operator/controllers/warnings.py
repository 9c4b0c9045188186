"""Warning events about objects that cannot say themselves why they wait.

A missing Secret, a volume that is still attached elsewhere, a quota: no status has them, only events do. They are read
when something has waited for a while and at no other time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import KubeError
from engram_operator.kube.kinds import EVENTS
from engram_operator.status.pods import is_ready, is_terminating, parse_time

PATIENCE = timedelta(seconds=5)
FRESH = timedelta(seconds=10)  # an answer is used for this long
OLDEST = timedelta(minutes=20)  # controllers repeat themselves at least this often
MOST_KEPT = 4096
_SAID_ELSEWHERE = frozenset({"FailedScheduling", "BackOff"})  # conditions and container statuses say it better

About = tuple[str, str]  # kind, name


@dataclass(frozen=True, slots=True)
class _Answer:
    at: datetime
    notes: tuple[str, ...]


class Warnings:
    """Reads events, each object's at most once in ten seconds."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._answers: dict[tuple[str, str], _Answer] = {}  # by namespace and uid

    async def about(self, objects: Iterable[Object], now: datetime) -> dict[About, tuple[str, ...]]:
        """Notes of Warning events of each of these objects, newest last."""
        found: dict[About, tuple[str, ...]] = {}
        for obj in objects:
            notes = await self._of(obj, now)
            if notes:
                found[str(obj["kind"]), str(obj["metadata"]["name"])] = notes
        return found

    async def _of(self, obj: Object, now: datetime) -> tuple[str, ...]:
        metadata = obj["metadata"]
        key = (str(metadata["namespace"]), str(metadata["uid"]))
        known = self._answers.get(key)
        if known is not None and now - known.at < FRESH:
            return known.notes
        fields = f"regarding.kind={obj['kind']},regarding.name={metadata['name']},type=Warning"
        try:
            events = await self._kube.list(EVENTS, key[0], fields=fields)
        except KubeError:  # only words are missing then
            return known.notes if known is not None else ()
        notes = tuple(_notes(events, str(metadata["uid"]), now))
        while len(self._answers) >= MOST_KEPT:
            del self._answers[next(iter(self._answers))]
        self._answers[key] = _Answer(now, notes)
        return notes


def _notes(events: Iterable[Mapping[str, Any]], uid: str, now: datetime) -> list[str]:
    found = []
    for event in events:
        if (event.get("regarding") or {}).get("uid") not in (uid, None, "") or event.get("reason") in _SAID_ELSEWHERE:
            continue
        series = event.get("series") or {}
        times = [
            parse_time(text)
            for text in (
                series.get("lastObservedTime"),
                event.get("deprecatedLastTimestamp"),
                event.get("eventTime"),
                (event.get("metadata") or {}).get("creationTimestamp"),
            )
            if text
        ]
        when = max((time for time in times if time is not None), default=now)
        if now - when < OLDEST and event.get("note"):
            found.append((when, str(event["note"])))
    return [note for _, note in sorted(found)]


def silent(pods: Iterable[Object], now: datetime) -> list[Object]:
    """Pods that have been waiting for a while."""
    return [pod for pod in pods if not is_ready(pod) and not is_terminating(pod) and _waits(pod, now)]


def _waits(obj: Object, now: datetime) -> bool:
    made = parse_time(obj["metadata"].get("creationTimestamp"))
    return made is not None and now - made > PATIENCE


def lacks_pods(stateful_set: Object | None, pods: Iterable[Object], wanted: int, now: datetime) -> bool:
    """The set has had time to make its pods, and has not."""
    return stateful_set is not None and len(list(pods)) < wanted and _waits(stateful_set, now)
