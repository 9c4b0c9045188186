"""All tenants' snapshots over a real store: listed, followed, pinned, deleted; and what survives a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engram_runtime.errors import NotFound
from engram_runtime.snapshots import overview
from engram_runtime.snapshots.views import KEEP
from tests.support.snapshots import World, tokens


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(overview, "SPACES_SECONDS", 0.0)
    monkeypatch.setattr(overview, "COUNT_SECONDS", 0.0)
    monkeypatch.setattr(overview, "COUNT_SHARE", 0)
    made = World(tmp_path, now=1_800_000_000.0)
    yield made
    made.service.close()


def saved(world, count=3, tenants=("acme", "beta")):
    """Ids, newest first."""
    found = []
    for turn in range(1, count + 1):
        for tenant in tenants:
            world.now += 1
            capture = world.save(tokens(40, seed=turn), f"{tenant} talk", turn, tenant=tenant)
            found.append(capture.snapshot_id)
    return found[::-1]


def test_all_tenants_newest_first_in_pages(world):
    expected = saved(world)
    for _ in range(2):
        found, after = [], None
        while True:
            page = world.service.overview.page(limit=4, after=after)
            found += page.items
            after = page.next
            if after is None:
                break
        assert [view.snapshot_id for view in found] == expected
        assert len({view.tenant_hash for view in found}) == 2
        assert len({view.conversation_hash for view in found}) == 2
        assert {view.turn_number for view in found} == {1, 2, 3}
        assert all(view.uri.startswith(f"file://{world.store_path}/v1/{view.tenant_hash}/") for view in found)
        assert not any(b"talk" in repr(view).encode() or b"acme" in repr(view).encode() for view in found)
        world.start()  # a process that has not heard of any tenant says the same
    census = world.service.overview.census(10.0)
    assert census.count == 6
    assert census.total_bytes > sum(view.bytes for view in found) / 2


def test_a_pin_and_an_expiry_survive(world):
    first, second, third = saved(world, 3, ("acme",))
    view = world.service.overview.change(second, pinned=True, ttl_seconds=100)
    assert (view.pinned, view.expires) == (True, world.now + 100)
    world.service.overview.change(third, ttl_seconds=100)
    world.start()
    shown = {item.snapshot_id: item for item in world.service.overview.page().items}
    assert (shown[second].pinned, shown[second].expires) == (True, world.now + 100)
    assert (shown[first].pinned, shown[first].expires) == (False, None)
    # The tenant's own calls say so too, and what is only expired is gone.
    assert world.service.get("acme", second).pinned
    world.now += 101
    assert {item.snapshot_id for item in world.service.overview.page().items} == {first, second}
    assert world.service.get("acme", second).pinned
    with pytest.raises(NotFound):
        world.service.get("acme", third)


def test_an_expiry_can_be_lifted_wherever_it_came_from(world):
    capture = world.save(tokens(40), tenant="acme", ttl_seconds=50)
    assert world.service.overview.view(capture.snapshot_id).expires == world.now + 50
    assert world.service.overview.change(capture.snapshot_id, ttl_seconds=None).expires is None
    assert world.service.overview.change(capture.snapshot_id, pinned=False, ttl_seconds=KEEP).expires is None
    world.start()
    world.now += 100
    assert world.service.get("acme", capture.snapshot_id).expires is None
    assert world.service.sweep().snapshots_deleted == 0


def test_a_replica_learns_of_a_pin_before_it_gives_up_a_snapshot(world, tmp_path):
    capture = world.save(tokens(40), tenant="acme", ttl_seconds=50)
    other = World(tmp_path, now=world.now, disk=False)
    try:
        assert other.service.get("acme", capture.snapshot_id).expires is not None
        world.service.overview.change(capture.snapshot_id, pinned=True)
        other.now += 100
        assert other.service.get("acme", capture.snapshot_id).pinned
    finally:
        other.service.close()


def test_removed_by_id_alone(world):
    newest, *rest = saved(world)
    world.start()
    removed = world.service.overview.remove(newest)
    assert removed.view.bytes > 0
    assert {view.snapshot_id for view in world.service.overview.page().items} == set(rest)
    for call in (world.service.overview.view, world.service.overview.remove, world.service.overview.change):
        with pytest.raises(NotFound):
            call(newest)
    with pytest.raises(ValueError, match="snapshot_id"):
        world.service.overview.remove("../../etc")
    world.start()
    assert newest not in {view.snapshot_id for view in world.service.overview.page().items}


def test_events_of_this_process_and_of_others(world, tmp_path):
    saved(world, 1)
    assert world.service.overview.events().lost  # nothing to go on from: list
    cursor = world.service.overview.events().next
    (fresh,) = saved(world, 1, ("gamma",))
    world.service.overview.change(fresh, pinned=True)
    page = world.service.overview.events(after=cursor)
    assert [(event.kind, event.snapshot.snapshot_id) for event in page.events] == [("saved", fresh), ("changed", fresh)]
    assert page.events[-1].snapshot.pinned
    other = World(tmp_path, now=world.now + 5, disk=False)
    try:
        there = other.save(tokens(40, seed=9), "elsewhere", tenant="acme").snapshot_id
        other.service.overview.remove(fresh)
    finally:
        other.service.close()
    page = world.service.overview.events(after=page.next)
    assert {(event.kind, event.snapshot.snapshot_id) for event in page.events} == {
        ("saved", there),
        ("deleted", fresh),
    }
    page = world.service.overview.events(after=page.next)
    assert (page.events, page.lost) == ([], False)
    old = page.next
    world.start()
    assert world.service.overview.events(after=old).lost
    for wrong in ("x", "", "a" * 600, "-5"):
        with pytest.raises(ValueError, match="after"):
            world.service.overview.events(after=wrong)


def test_events_are_read_in_pages(world):
    cursor = world.service.overview.events().next
    expected = saved(world, 4, ("acme",))[::-1]
    found = []
    for _ in range(2):
        page = world.service.overview.events(after=cursor, limit=2)
        found += [event.snapshot.snapshot_id for event in page.events]
        cursor = page.next
    assert found == expected


def test_without_a_durable_tier_memory_is_shown(tmp_path):
    world = World(tmp_path, disk=False, store=False)
    try:
        capture = world.save(tokens(40), tenant="acme")
        (view,) = world.service.overview.page().items
        assert (view.snapshot_id, view.uri) == (capture.snapshot_id, None)
        assert world.service.overview.census().count == 1
        world.service.overview.change(capture.snapshot_id, pinned=True)
        assert world.service.get("acme", capture.snapshot_id).pinned
        world.service.overview.remove(capture.snapshot_id)
        assert world.service.overview.page().items == []
    finally:
        world.service.close()


def test_another_keys_snapshots_are_not_shown(world, tmp_path):
    saved(world, 1)
    config = replace(world.config, tenant_key=b"another key, also of 32 bytes....")
    other = World(tmp_path, now=world.now, disk=False, config=config)
    try:
        assert other.service.overview.page().items == []
        mine = other.save(tokens(40), tenant="acme").snapshot_id
        assert [view.snapshot_id for view in other.service.overview.page().items] == [mine]
    finally:
        other.service.close()


def test_how_saves_ended_is_told(world):
    assert world.service.overview.outcomes().last_success_time is None
    saved(world, 1, ("acme",))
    outcomes = world.service.overview.outcomes()
    assert (outcomes.last_success_time, outcomes.last_failure_time) == (world.now, None)


def test_a_new_tenant_is_listed_at_once(world, monkeypatch):
    """The list of tenants is kept for a while; a first snapshot must not wait for the next one."""
    monkeypatch.setattr(overview, "SPACES_SECONDS", 3600.0)
    assert world.service.overview.page().items == []
    expected = saved(world, 1)
    assert [view.snapshot_id for view in world.service.overview.page().items] == expected
    assert world.service.overview.census(10.0).count == 2
