"""What changed: one log per tenant, fed by this process and by the store, so that it survives a restart.

Within one process a cursor is a sequence number and nothing is repeated. A cursor from before a restart falls back to
its time, less an overlap (snapshots become durable some time after their id was made, and clocks differ): such a reader
sees some events twice, and none is lost.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.io.repository import Repository
from engram_runtime.snapshots.io.store import StoreUnavailable
from engram_runtime.snapshots.policy import ids, keys
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.tiers import Tier
from engram_runtime.snapshots.types import Event, EventPage, SnapshotInfo
from engram_runtime.snapshots.views import Kind

OVERLAP_SECONDS = 900.0
MAX_EVENTS = 10_000
MAX_SPACES = 1024
FIRST_READ = MAX_EVENTS  # snapshots that a new process looks back over
_CURSOR = re.compile(r"([0-9a-f]{16})-([0-9]{1,15})-([0-9]{1,15})")


@dataclass(slots=True)
class _Log:
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    sequence: int = 0
    seen: set[str] = field(default_factory=set)
    read_until: float | None = None  # everything made before this was read from the store


class EventLog:
    """`describe(space, snapshot_id)` reads a snapshot's summary (NotFound when it is gone); `on_gone` is told of
    tombstones that other writers left; `observe(kind, space, snapshot_id)` of every event that is new here."""

    def __init__(
        self,
        describe: Callable[[Space, str], SnapshotInfo],
        on_gone: Callable[[Space, str], None],
        clock: Callable[[], float],
        observe: Callable[[Kind, Space, str], None] = lambda kind, space, snapshot_id: None,
    ) -> None:
        self._describe = describe
        self._on_gone = on_gone
        self._clock = clock
        self._observe = observe
        self._epoch = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._logs: OrderedDict[Space, _Log] = OrderedDict()

    def saved(self, space: Space, snapshot_id: str) -> None:
        with self._lock:
            log = self._log(space)
            if snapshot_id not in log.seen:
                self._append(log, "saved", snapshot_id, snapshot_id, ids.id_time(snapshot_id))
                self._observe("saved", space, snapshot_id)

    def deleted(self, space: Space, event_id: str, snapshot_id: str) -> None:
        with self._lock:
            log = self._log(space)
            if f"{event_id}/{snapshot_id}" not in log.seen:
                time = ids.id_time(event_id)
                self._append(log, "deleted", f"{event_id}/{snapshot_id}", snapshot_id, time)
                self._observe("deleted", space, snapshot_id)

    def page(self, space: Space, tier: Tier | None, after: str | None, limit: int) -> EventPage:
        """ValueError for a cursor that is not one. Trouble in the store leaves what this process knows."""
        sequence, since = self._parse(after)
        if tier is not None:
            with suppress(SnapshotError):
                self.refresh(space, tier)
        with self._lock:
            log = self._log(space)
            first = log.sequence - len(log.events)
            start = first if sequence is None else max(sequence, first)
            fresh = [
                Event(self._cursor(number + 1, event.time), event.kind, event.snapshot_id, event.time, None)
                for number, event in enumerate(log.events, start=first)
                if number >= start and (sequence is not None or event.time >= since)
            ][:limit]
            cursor = fresh[-1].cursor if fresh else self._cursor(log.sequence, self._clock())
        return EventPage([self._described(space, event) for event in fresh], cursor)

    def _described(self, space: Space, event: Event) -> Event:
        """With the summary, unless the snapshot is gone or out of reach by now."""
        if event.kind != "saved":
            return event
        with suppress(SnapshotError):
            return replace(event, info=self._describe(space, event.snapshot_id))
        return event

    def refresh(self, space: Space, tier: Tier) -> None:
        """Read what is new in the store. StoreUnavailable."""
        now = self._clock()
        with self._lock:
            log = self._log(space)
            since = None if log.read_until is None else log.read_until - OVERLAP_SECONDS
        repository = tier.repository
        with tier.reading():
            gone = self._new_ids(repository, space.tombstones(), since)
            for event_id in gone:
                self._read_tombstone(repository, space, event_id)
            for snapshot_id in self._new_ids(repository, space.snapshots(), since):
                self.saved(space, snapshot_id)
        with self._lock:
            log.read_until = now

    def _new_ids(self, repository: Repository, prefix: str, since: float | None) -> list[str]:
        """Oldest first; a listing is newest first by the form of the ids."""
        floor = None if since is None else ids.id_floor(since)
        found: list[str] = []
        for info in repository.objects(prefix):
            parsed = keys.parse(info.key)
            if parsed is None:
                continue
            if (floor is not None and parsed.name > floor) or len(found) >= FIRST_READ:
                break
            found.append(parsed.name)
        return found[::-1]

    def _read_tombstone(self, repository: Repository, space: Space, event_id: str) -> None:
        with self._lock:
            log = self._log(space)
            if event_id in log.seen:
                return
        try:
            gone = repository.read_tombstone(space, event_id)
        except StoreUnavailable:
            raise
        except NotFound:
            return
        except SnapshotError:
            gone = []
        for snapshot_id in gone:
            self.deleted(space, event_id, snapshot_id)
            self._on_gone(space, snapshot_id)
        with self._lock:
            log.seen.add(event_id)

    def _log(self, space: Space) -> _Log:
        log = self._logs.get(space)
        if log is None:
            log = self._logs[space] = _Log()
            if len(self._logs) > MAX_SPACES:
                self._logs.popitem(last=False)
        self._logs.move_to_end(space)
        return log

    def _append(self, log: _Log, kind: str, key: str, snapshot_id: str, time: float) -> None:
        log.seen.add(key)
        log.events.append(Event("", kind, snapshot_id, time, None))
        log.sequence += 1
        if len(log.seen) > 8 * MAX_EVENTS:
            kept = {event.snapshot_id for event in log.events}
            log.seen = {name for name in log.seen if name.rsplit("/", 1)[-1] in kept}

    def _cursor(self, sequence: int, time: float) -> str:
        return f"{self._epoch}-{sequence}-{int(time * 1000)}"

    def _parse(self, after: str | None) -> tuple[int | None, float]:
        """(sequence number if it is of this process, else None; time to start from)."""
        if after is None:
            return None, 0.0
        match = _CURSOR.fullmatch(after)
        if match is None:
            raise ValueError("after must be a cursor that an earlier call returned")
        if match[1] == self._epoch:
            return int(match[2]), 0.0
        return None, int(match[3]) / 1000 - OVERLAP_SECONDS
