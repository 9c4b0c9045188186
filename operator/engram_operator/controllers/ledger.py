"""What an engine's store holds of a model, newest first and bounded: turns, each with its boundaries.

Filled from a listing and kept by events. The store may hold a million snapshots; only as many turns are remembered as
can be published, and what is older is known to be older, not to be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engram_operator.engines import SnapshotEvent, StoredSnapshot

Turn = tuple[str, str, str, int]  # tenant, conversation and branch hash, turn number
SLACK = 50  # turns beyond the limit, so that a few deletions need no new listing


@dataclass(slots=True)
class Group:
    """One turn of a branch. Never empty."""

    turn: Turn
    records: dict[str, StoredSnapshot] = field(default_factory=dict)

    @property
    def created(self) -> float:
        """Of its oldest boundary: a turn does not become newer when another boundary of it is saved."""
        return min(record.created for record in self.records.values())

    @property
    def pinned(self) -> bool:
        return any(record.pinned for record in self.records.values())


@dataclass(slots=True)
class Ledger:
    """`limit`: turns to remember. `complete`: the store holds nothing of the model that is not here."""

    limit: int
    complete: bool = False
    fresh: bool = False  # listed anew since somebody last looked
    touched: set[Turn] = field(default_factory=set)  # changed since somebody last took this
    gone: set[str] = field(default_factory=set)  # deleted since, by id
    _groups: dict[Turn, Group] = field(default_factory=dict)
    _by_id: dict[str, Group] = field(default_factory=dict)

    def begin(self, limit: int) -> None:
        """Before a new listing."""
        self.limit, self.complete, self.fresh = limit, False, True
        self.touched.clear()
        self.gone.clear()
        self._groups.clear()
        self._by_id.clear()

    @property
    def full(self) -> bool:
        return len(self._groups) >= self.limit + SLACK

    @property
    def short(self) -> bool:
        """It has fewer turns than could be published, and the store may have more."""
        return not self.complete and len(self._groups) < self.limit

    def group_of(self, snapshot_id: str) -> Group | None:
        return self._by_id.get(snapshot_id)

    def newest(self) -> list[Group]:
        return sorted(self._groups.values(), key=lambda group: (-group.created, group.turn))

    def ids(self) -> frozenset[str]:
        return frozenset(self._by_id)

    def add(self, record: StoredSnapshot) -> None:
        self.remove(record.snapshot_id)
        turn = (record.tenant_hash, record.conversation_hash, record.branch_name_hash or "", record.turn_number)
        group = self._groups.get(turn)
        if group is None:
            group = self._groups[turn] = Group(turn)
        group.records[record.snapshot_id] = record
        self._by_id[record.snapshot_id] = group
        self.touched.add(turn)

    def remove(self, snapshot_id: str) -> None:
        group = self._by_id.pop(snapshot_id, None)
        if group is None:
            return
        del group.records[snapshot_id]
        self.touched.add(group.turn)
        if not group.records:
            del self._groups[group.turn]

    def apply(self, events: Iterable[SnapshotEvent], unless: Callable[[str], bool]) -> None:
        """Take events in. `unless` names ids that must not come back."""
        for event in events:
            if event.kind == "deleted":
                self.remove(event.snapshot_id)
                self.gone.add(event.snapshot_id)
            elif event.snapshot is not None and not unless(event.snapshot_id):
                self.add(event.snapshot)
        self.trim()

    def trim(self) -> None:
        """Forget the oldest turns beyond what is needed."""
        if len(self._groups) <= self.limit + SLACK:
            return
        for group in self.newest()[self.limit + SLACK :]:
            for snapshot_id in list(group.records):
                self.remove(snapshot_id)
        self.complete = False
