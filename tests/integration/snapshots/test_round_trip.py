"""Save, forget, find again, bit for bit: every tier, dense, hybrid and pure-state models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engram_runtime.snapshots.types import Miss
from tests.support.snapshots import World, tokens


def test_host_tier(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout, disk=False, store=False)
    prompt = tokens(300)
    saved = world.save(prompt[:290])
    fetched = world.find(prompt)
    world.check(fetched, saved)
    assert (fetched.tier, fetched.position) == ("host", 290)
    assert world.released == [saved.snapshot_id]
    assert world.results[saved.snapshot_id].tiers == ("host",)


@pytest.mark.parametrize("tier", ["disk", "store"])
def test_durable_tier_after_restart(make_world: Callable[..., World], layout: str, tier: str) -> None:
    world = make_world(layout, disk=tier == "disk", store=tier == "store")
    prompt = tokens(300)
    saved = world.save(prompt[:290])
    assert world.results[saved.snapshot_id].tiers == ("host", tier)
    world.start()
    fetched = world.find(prompt, candidates=(290, 120))
    world.check(fetched, saved)
    assert fetched.tier == tier
    assert fetched.bytes > 0
    again = world.find(prompt, candidates=(290, 120))
    world.check(again, saved)
    assert again.tier == "host"


def test_by_conversation_without_candidates(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    prompt = tokens(80)
    saved = world.save(prompt[:70], "chat-1")
    world.start()
    assert isinstance(world.find(prompt), Miss)
    fetched = world.find(prompt, conversation_id="chat-1")
    world.check(fetched, saved)
    assert (fetched.conversation_id, fetched.turn_number, fetched.boundary) == ("chat-1", 1, "turn_end")


def test_named_snapshot(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    prompt = tokens(90)
    first = world.save(prompt[:40])
    world.save(prompt[:70], turn=2, parent=first.snapshot_id)
    world.start()
    fetched = world.find(prompt, restore_from=first.snapshot_id)
    world.check(fetched, first)
    assert fetched.snapshot_id == first.snapshot_id


def test_store_promotes_to_disk(make_world: Callable[..., World], layout: str, tmp_path: Path) -> None:
    writer = make_world(layout, disk=False)
    prompt = tokens(500)
    first = writer.save(prompt[:300])
    saved = writer.save(prompt[:480], turn=2, parent=first.snapshot_id)
    reader = make_world(layout, device=writer.device)
    fetched = reader.find(prompt, candidates=(480,))
    reader.check(fetched, saved)
    assert fetched.tier == "store"
    assert reader.service._saver.wait(240)
    assert reader.service.get("default", saved.snapshot_id).tiers == ("host", "disk", "store")
    reader.store = False
    reader.start()
    reader.check(reader.find(prompt, candidates=(480,)), saved)
    assert all(report.ok for report in reader.service.fsck())


def test_dense_uses_any_prefix_and_skips_what_the_gpu_has(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    prompt = tokens(300)
    saved = world.save(prompt[:290], user_start=100)
    other = prompt[:200] + tokens(100, seed=5)
    for restarted in (False, True):
        if restarted:
            world.start()
        fetched = world.find(other, candidates=(150, 100), min_position=50, kv_from=48)
        world.check(fetched, saved, kv_from=48)
        assert fetched.position == 200


def test_hybrid_restores_exact_positions_only(make_world: Callable[..., World]) -> None:
    world = make_world("hybrid")
    prompt = tokens(300)
    early = world.save(prompt[:100], boundary="history")
    world.save(prompt[:290], parent=early.snapshot_id)
    other = prompt[:200] + tokens(100, seed=5)
    world.check(world.find(other), early)
    world.start()
    world.check(world.find(other, candidates=(200, 100)), early)
    assert isinstance(world.find(tokens(300, seed=9), candidates=(200, 100)), Miss)


def test_whole_prompt_is_never_restored(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    prompt = tokens(64)
    world.save(prompt)
    assert world.find(prompt).position == 63
    hybrid = make_world("hybrid", root=world.root / "h")
    hybrid.save(prompt)
    assert isinstance(hybrid.find(prompt), Miss)


def test_pieces_are_shared_and_cut(make_world: Callable[..., World]) -> None:
    world = make_world("dense", disk=False)
    prompt = tokens(600)
    first = world.save(prompt[:200], user_start=50)
    second = world.save(prompt[:400], turn=2, parent=first.snapshot_id)
    record = world.service._shared.catalogue.get(world.service._shared.space("default"), second.snapshot_id)
    assert record is not None
    assert [(p.start, p.end) for p in record.manifest.pieces] == [(0, 50), (50, 200), (200, 400)]
    assert world.device.reads[-1] == (200, 200)
    # another conversation with the same system prompt, and no parent
    other = prompt[:50] + tokens(100, seed=3)
    third = world.save(other, "d", user_start=50)
    record = world.service._shared.catalogue.get(world.service._shared.space("default"), third.snapshot_id)
    assert record is not None
    assert record.manifest.pieces[0].file in {p.file for p in _pieces(world, first)}
    world.start()
    world.check(world.find(prompt, candidates=(400,)), second)


def _pieces(world: World, capture: Any) -> Any:
    space = world.service._shared.space("default")
    record = world.service._shared.catalogue.get(space, capture.snapshot_id)
    assert record is not None
    return record.manifest.pieces


def test_more_than_32_pieces_are_merged(make_world: Callable[..., World]) -> None:
    world = make_world("dense", disk=False)
    prompt = tokens(40 * 10 + 5)
    parent, capture = None, None
    for turn in range(1, 41):
        capture = world.save(prompt[: 10 * turn], turn=turn, parent=parent)
        parent = capture.snapshot_id
        assert len(_pieces(world, capture)) <= 32
    assert capture is not None
    world.start()
    world.check(world.find(prompt, candidates=(400,)), capture)


def test_nothing_new_writes_nothing(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    prompt = tokens(100)
    saved = world.save(prompt, slot=1)
    before = world.service.counters()
    again = world.save(prompt, slot=1, parent=saved.snapshot_id)
    after = world.service.counters()
    assert world.results[again.snapshot_id].reason == "unchanged"
    assert world.results[again.snapshot_id].snapshot_id == saved.snapshot_id
    assert after["puts.store"] == before["puts.store"]
    assert after["puts.disk"] == before["puts.disk"]
    assert world.service.get("default", again.snapshot_id).snapshot_id == saved.snapshot_id


def test_at_most_five_puts_a_turn(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout, disk=False)
    prompt = tokens(900)
    parent = None
    for turn, length in enumerate((100, 250, 300, 700, 900), start=1):
        before = world.service.counters().get("puts.store", 0)
        capture = world.save(prompt[:length], turn=turn, parent=parent, user_start=length - 20)
        puts = world.service.counters()["puts.store"] - before
        assert puts <= 5
        parent = capture.snapshot_id
    assert world.service.counters().get("touches.store", 0) == 0


def test_a_long_idle_conversation_looks_once(make_world: Callable[..., World]) -> None:
    """The files of 20 turns are not touched one by one: the parent, still there, protects them all."""
    world = make_world("dense", disk=False)
    prompt = tokens(25 * 20)
    parent = None
    for turn in range(1, 21):
        parent = world.save(prompt[: 25 * turn - 5], turn=turn, parent=parent).snapshot_id
    world.service._shared.tiers[0].repository._live.clear()  # as after a quarter of the grace
    before = world.service.counters()
    world.save(prompt, turn=21, parent=parent)
    after = world.service.counters()
    assert after["puts.store"] - before["puts.store"] <= 5
    assert after.get("touches.store", 0) == before.get("touches.store", 0)
    assert after["heads.store"] - before.get("heads.store", 0) == 1
