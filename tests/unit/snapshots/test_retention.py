"""Retention as a pure function: what it promises holds for any history."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.snapshots.policy.retention import (
    RetentionPolicy,
    SnapshotFacts,
    choose_deletions,
    total_bytes,
)

NOW = 1_000_000.0


@st.composite
def histories(draw: st.DrawFn) -> list[SnapshotFacts]:
    facts: list[SnapshotFacts] = []
    for number in range(draw(st.integers(0, 25))):
        created = draw(st.floats(0, NOW))
        facts.append(
            SnapshotFacts(
                snapshot_id=f"s{number}",
                parent_id=draw(st.none() | st.sampled_from([f.snapshot_id for f in facts])) if facts else None,
                conversation=draw(st.sampled_from(["a", "b", "c"])),
                branch=draw(st.sampled_from(["main", "other"])),
                turn_number=draw(st.integers(0, 6)),
                created=created,
                last_used=created + draw(st.floats(0, 1000)),
                expires=draw(st.none() | st.floats(0, 2 * NOW)),
                pinned=draw(st.booleans()) and draw(st.booleans()),
                nbytes=draw(st.integers(1, 100)),
                files=draw(st.dictionaries(st.sampled_from("xyzw"), st.just(50), max_size=3)),
            )
        )
    return facts


POLICIES = st.builds(
    RetentionPolicy,
    keep_last=st.integers(1, 4),
    max_age_seconds=st.none() | st.floats(1, NOW),
    max_conversations=st.none() | st.integers(1, 3),
    max_total_bytes=st.none() | st.integers(1, 2000),
)


def left(facts: list[SnapshotFacts], policy: RetentionPolicy) -> list[SnapshotFacts]:
    gone = choose_deletions(facts, policy, NOW)
    return [fact for fact in facts if fact.snapshot_id not in gone]


@given(histories(), POLICIES)
def test_promises(facts: list[SnapshotFacts], policy: RetentionPolicy) -> None:
    gone = choose_deletions(facts, policy, NOW)
    kept = left(facts, policy)
    assert gone.keys() <= {fact.snapshot_id for fact in facts}
    assert all(fact in kept for fact in facts if fact.pinned)
    for fact in kept:
        if fact.pinned:
            continue
        assert fact.expires is None or fact.expires > NOW
        if policy.max_age_seconds is not None:
            assert NOW - max(fact.created, fact.last_used) <= policy.max_age_seconds
    loose = [fact for fact in kept if not fact.pinned]
    if policy.max_total_bytes is not None and loose:
        assert total_bytes(kept) <= policy.max_total_bytes
    if policy.max_conversations is not None and loose:
        conversations = {fact.conversation for fact in kept}
        pinned = {fact.conversation for fact in kept if fact.pinned}
        assert len(conversations - pinned) <= policy.max_conversations
    assert choose_deletions(facts[::-1], policy, NOW) == gone


@given(histories(), st.integers(1, 4))
def test_only_keep_last(facts: list[SnapshotFacts], keep_last: int) -> None:
    """The newest turns of every branch stay, with all boundaries; nothing else unpinned, but branch points."""
    facts = [replace(fact, expires=None) for fact in facts]
    kept = {fact.snapshot_id for fact in left(facts, RetentionPolicy(keep_last=keep_last))}
    for branch in {(fact.conversation, fact.branch) for fact in facts}:
        turns: dict[int, float] = {}
        members = [fact for fact in facts if (fact.conversation, fact.branch) == branch]
        for fact in members:
            turns[fact.turn_number] = max(turns.get(fact.turn_number, 0.0), fact.created)
        newest = sorted(turns, key=lambda turn: (turns[turn], turn))[-keep_last:]
        for fact in members:
            if fact.turn_number in newest:
                assert fact.snapshot_id in kept
            elif fact.snapshot_id in kept and not fact.pinned:
                children = [f for f in facts if f.parent_id == fact.snapshot_id and f.snapshot_id in kept]
                assert any((c.conversation, c.branch) != branch for c in children)


@given(histories(), POLICIES)
def test_a_second_sweep_follows_from_the_first(facts: list[SnapshotFacts], policy: RetentionPolicy) -> None:
    """Sweeping again can only let go of branch points whose branches went; a third time changes nothing more."""
    once = left(facts, policy)
    for _ in range(len(facts) + 1):
        again = left(once, policy)
        assert {f.snapshot_id for f in again} <= {f.snapshot_id for f in once}
        once = again
    assert left(once, policy) == once


@given(histories())
def test_without_limits_only_old_turns_go(facts: list[SnapshotFacts]) -> None:
    facts = [replace(fact, expires=None) for fact in facts]
    assert left(facts, RetentionPolicy(keep_last=100)) == facts


def fact(name: str, **more: object) -> SnapshotFacts:
    values: dict[str, object] = {
        "snapshot_id": name, "parent_id": None, "conversation": "c", "branch": "main", "turn_number": 1,
        "created": NOW - 10, "last_used": NOW - 10, "expires": None, "pinned": False, "nbytes": 10,
    }  # fmt: skip
    return SnapshotFacts(**{**values, **more})  # type: ignore[arg-type]


def test_use_renews_age() -> None:
    old, used = fact("old", created=0, last_used=0), fact("used", created=0, last_used=NOW - 5, conversation="d")
    assert choose_deletions([old, used], RetentionPolicy(max_age_seconds=100), NOW) == {"old": "max_age"}


def test_shared_files_count_once_and_leave_last() -> None:
    one = fact("one", files={"x": 1000}, last_used=NOW - 3, conversation="a")
    two = fact("two", files={"x": 1000, "y": 10}, last_used=NOW - 2, conversation="b")
    three = fact("three", files={"z": 10}, last_used=NOW - 1, conversation="c")
    assert total_bytes([one, two, three]) == 1050
    gone = choose_deletions([one, two, three], RetentionPolicy(max_total_bytes=1045), NOW)
    assert gone == {"one": "max_total_size"}
    gone = choose_deletions([one, two, three], RetentionPolicy(max_total_bytes=1000), NOW)
    assert set(gone) == {"one", "two"}


def test_a_client_that_counts_from_one_again_keeps_its_newest_turn() -> None:
    before = [fact(f"t{n}", turn_number=n, created=NOW - 100 + n) for n in range(2, 6)]
    restarted = fact("again", turn_number=1, created=NOW - 1)
    gone = choose_deletions([*before, restarted], RetentionPolicy(keep_last=1), NOW)
    assert set(gone) == {"t2", "t3", "t4", "t5"}
