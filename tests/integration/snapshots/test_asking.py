"""When a lookup asks disks and stores, and when what memory holds is enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.types import Fetched, Miss
from tests.support.snapshots import RecordingStore, World, tokens

PROMPT = tokens(900, seed=41)
FIRST, SECOND = 300, 700


@pytest.fixture
def store(tmp_path: Path) -> RecordingStore:
    return RecordingStore(LocalStore(tmp_path / "store"))


def reads(world: World, store: RecordingStore, **query: object) -> tuple[object, list[str]]:
    """What was found, and the objects that were read for it."""
    store.calls.clear()
    found = world.find(PROMPT, conversation_id="c", **query)
    return found, store.keys("get")


@pytest.mark.parametrize("layout", ["dense", "hybrid"])
def test_nobody_is_asked_for_more_than_the_prompt_can_use(
    make_world: Callable[..., World], store: RecordingStore, layout: str
) -> None:
    world = make_world(layout, disk=False, shared_store=store)
    world.save(PROMPT[:FIRST])
    saved = world.save(PROMPT[:SECOND], turn=2)
    for candidates in ((SECOND, FIRST), (FIRST, SECOND), (SECOND + 2, SECOND)):
        found, read = reads(world, store, candidates=candidates)
        world.check(found, saved)
        assert read == []


@pytest.mark.parametrize("candidates", [(), (SECOND + 100, SECOND)])
def test_a_longer_snapshot_of_another_replica_is_looked_for(
    make_world: Callable[..., World], store: RecordingStore, candidates: tuple[int, ...]
) -> None:
    world = make_world("dense", disk=False, shared_store=store)
    world.save(PROMPT[:SECOND])
    other = make_world("dense", disk=False, shared_store=store)
    longer = other.save(PROMPT[: SECOND + 100], turn=2)
    found, read = reads(world, store, candidates=candidates)
    world.check(found, longer)
    assert any("/ref" in key for key in read)


def test_where_memory_was_wrong_the_head_is_asked_after_all(
    make_world: Callable[..., World], store: RecordingStore
) -> None:
    other = make_world("dense", disk=False, shared_store=store)
    other.save(PROMPT[:FIRST], turn=7)
    world = make_world("dense", disk=False, shared_store=store)
    world.save(PROMPT[:SECOND], turn=2, durable=False)
    world.service._shared.host.clear()
    found, _ = reads(world, store, candidates=(SECOND,), min_position=FIRST)
    assert isinstance(found, Miss)
    assert "KV tokens [0, 700) is not on the store tier" in found.reason
    assert found.head_turn == 7


@pytest.mark.parametrize("layout", ["dense", "hybrid"])
def test_a_short_turn_that_another_replica_answered_is_looked_for(
    make_world: Callable[..., World], store: RecordingStore, layout: str
) -> None:
    """However little it would save: who does not know of it takes its number, and its place on the branch."""
    world = make_world(layout, disk=False, shared_store=store)
    first = world.save(PROMPT[:SECOND])
    other = make_world(layout, disk=False, shared_store=store)
    short = other.save(PROMPT[: SECOND + 12], turn=2, parent=first.snapshot_id)
    ends = (SECOND + 24, SECOND + 17, SECOND + 13, SECOND + 12, SECOND + 8, SECOND + 5, SECOND)
    found, _ = reads(world, store, candidates=ends)
    world.check(found, short)
    assert isinstance(found, Fetched)
    assert found.turn_number == 2


def test_a_refused_restore_tells_the_turn_of_the_head(make_world: Callable[..., World], store: RecordingStore) -> None:
    world = make_world("dense", disk=False, shared_store=store)
    world.save(PROMPT[:SECOND], turn=7)
    for candidates in ((SECOND,), (SECOND + 2, SECOND)):
        found, _ = reads(world, store, candidates=candidates, prefill_tokens_per_second=1e9)
        assert isinstance(found, Miss)
        assert "prefill" in found.reason
        assert found.head_turn == 7
