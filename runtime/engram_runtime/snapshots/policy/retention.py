"""Which snapshots to let go: a pure function over facts, so that it can be tested without a clock or a store.

Order of the rules: what is pinned stays, always. What has expired, or was not used for max_age, goes. Of each
conversation's branch the newest `keep_last` turns stay with all their boundaries, and so does what another branch or
conversation came from; the rest goes, however young. Then whole conversations beyond max_conversations, least recently
used first, and single snapshots, least recently used first, until the total fits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_Key = TypeVar("_Key", int, str)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    keep_last: int = 1
    max_age_seconds: float | None = None
    max_conversations: int | None = None
    max_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """`files` maps the KV files it needs to their sizes: shared files count once in the total."""

    snapshot_id: str
    parent_id: str | None
    conversation: str  # unique across tenants (the caller joins the namespace in)
    branch: str
    turn_number: int
    created: float
    last_used: float
    expires: float | None
    pinned: bool
    nbytes: int  # the snapshot file alone
    files: Mapping[str, int] = field(default_factory=dict)


def choose_deletions(facts: Iterable[SnapshotFacts], policy: RetentionPolicy, now: float) -> dict[str, str]:
    """Snapshot id -> reason ("expired", "max_age", "keep_last", "max_conversations", "max_total_size")."""
    everything = {fact.snapshot_id: fact for fact in facts}
    gone: dict[str, str] = {}
    for fact in everything.values():
        if fact.pinned:
            continue
        if fact.expires is not None and fact.expires <= now:
            gone[fact.snapshot_id] = "expired"
        elif policy.max_age_seconds is not None and now - max(fact.created, fact.last_used) > policy.max_age_seconds:
            gone[fact.snapshot_id] = "max_age"
    alive = {key: fact for key, fact in everything.items() if key not in gone}
    kept = _kept_by_turns(alive, policy.keep_last)
    gone.update({key: "keep_last" for key in alive if key not in kept})
    if policy.max_conversations is not None:
        _limit_conversations(kept, policy.max_conversations, gone)
    if policy.max_total_bytes is not None:
        _limit_bytes(kept, policy.max_total_bytes, gone)
    return gone


def total_bytes(facts: Iterable[SnapshotFacts]) -> int:
    """Bytes of these snapshots, shared KV files once."""
    files: dict[str, int] = {}
    total = 0
    for fact in facts:
        total += fact.nbytes
        files.update(fact.files)
    return total + sum(files.values())


def _kept_by_turns(alive: Mapping[str, SnapshotFacts], keep_last: int) -> dict[str, SnapshotFacts]:
    """Newest turns are told by creation, not by number: a client that lost its state may count from one again."""
    turns: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for fact in alive.values():
        newest = turns[fact.conversation, fact.branch]
        newest[fact.turn_number] = max(newest.get(fact.turn_number, 0.0), fact.created)
    recent = {branch: _newest(created)[:keep_last] for branch, created in turns.items()}
    kept = {
        key: fact
        for key, fact in alive.items()
        if fact.pinned or fact.turn_number in recent[fact.conversation, fact.branch]
    }
    for fact in list(kept.values()):
        parent = alive.get(fact.parent_id) if fact.parent_id is not None else None
        if parent is not None and (parent.conversation, parent.branch) != (fact.conversation, fact.branch):
            kept[parent.snapshot_id] = parent
    return kept


def _newest(values: Mapping[_Key, float]) -> list[_Key]:
    """Keys by falling value; ties by falling key, so that the choice does not depend on the order of a listing."""
    return sorted(values, key=lambda key: (values[key], key), reverse=True)


def _limit_conversations(kept: dict[str, SnapshotFacts], limit: int, gone: dict[str, str]) -> None:
    used: dict[str, float] = defaultdict(float)
    for fact in kept.values():
        used[fact.conversation] = max(used[fact.conversation], fact.created, fact.last_used)
    surplus = set(_newest(used)[limit:])
    for key, fact in list(kept.items()):
        if fact.conversation in surplus and not fact.pinned:
            gone[key] = "max_conversations"
            del kept[key]


def _limit_bytes(kept: dict[str, SnapshotFacts], limit: int, gone: dict[str, str]) -> None:
    users: Counter[str] = Counter(name for fact in kept.values() for name in fact.files)
    total = total_bytes(kept.values())
    by_use = sorted(kept.values(), key=lambda f: (max(f.created, f.last_used), f.created, f.snapshot_id))
    for fact in by_use:
        if total <= limit:
            return
        if fact.pinned:
            continue
        total -= fact.nbytes
        for name, size in fact.files.items():
            users[name] -= 1
            if not users[name]:
                total -= size
        gone[fact.snapshot_id] = "max_total_size"
        del kept[fact.snapshot_id]
