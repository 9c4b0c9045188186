"""The state at user_start: kept in the turn's own snapshot, found by an anchor of its own, and as exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engram_runtime.snapshots.types import Capture, Fetched
from tests.support.snapshots import HYBRID, World, tokens

PROMPT = tokens(290)
START = 100
STRANGER = [*PROMPT[:START], *tokens(80, seed=9)]


def saved(world: World) -> Capture:
    return world.save(PROMPT, user_start=START, start_slot=2, slot=1)


def expect_start(world: World, fetched: object, capture: Capture) -> None:
    """Bit for bit what the device had there; another turn than the snapshot's."""
    assert isinstance(fetched, Fetched), fetched
    assert (fetched.position, fetched.boundary) == (START, "user_start")
    assert fetched.state is not None
    for name, value in world.device.read_state(2).items():
        assert torch.equal(fetched.state[name].view(torch.uint8), value.view(torch.uint8))
    for first, packed in fetched.kv:
        assert torch.equal(packed, world.device.read_kv(capture.block_ids, first, packed.shape[3]))
    assert sum(packed.shape[3] for _, packed in fetched.kv) == START


@pytest.mark.parametrize("tier", ["host", "disk", "store"])
def test_from_every_tier(make_world: Callable[..., World], tier: str) -> None:
    world = make_world("hybrid", disk=tier == "disk", store=tier == "store")
    capture = saved(world)
    if tier != "host":
        world.only_host()
    fetched = world.find(STRANGER, candidates=(150, START), needs_state=True)
    expect_start(world, fetched, capture)
    assert fetched.tier == tier
    again = world.find([*PROMPT, 7, 1], candidates=(290,), needs_state=True)
    world.check(again, capture)
    assert again.boundary == "turn_end"


def test_copied_to_a_tier_that_lacks_it(make_world: Callable[..., World]) -> None:
    world = make_world("hybrid", disk=False)
    capture = saved(world)
    world.disk = True
    world.only_host()
    assert isinstance(world.find([*PROMPT, 7, 1], candidates=(290,), needs_state=True), Fetched)
    assert world.service._saver.wait(240)
    world.store = False
    world.only_host()
    expect_start(world, world.find(STRANGER, candidates=(START,), needs_state=True), capture)


def test_a_deleted_snapshot_takes_both_with_it(make_world: Callable[..., World]) -> None:
    world = make_world("hybrid", disk=False)
    capture = saved(world)
    world.service.delete("default", capture.snapshot_id)
    assert not isinstance(world.find(STRANGER, candidates=(START,), needs_state=True), Fetched)
    assert list(world.store_path.rglob("anchor/*/*")) == []
    assert world.service._shared.host.count == 0


def test_damage_is_refused(make_world: Callable[..., World]) -> None:
    world = make_world("hybrid", disk=False)
    capture = saved(world)
    path = next(world.store_path.rglob(f"snap/*/{capture.snapshot_id}"))
    data = bytearray(path.read_bytes())
    value = world.device.read_state(2)["ssm"].contiguous().view(torch.uint8).numpy().tobytes()
    at = bytes(data).index(value)
    data[at] ^= 1
    path.write_bytes(bytes(data))
    world.only_host()
    missed = world.find(STRANGER, candidates=(START,), needs_state=True)
    assert not isinstance(missed, Fetched)
    assert missed.failed
    assert "start.ssm" in missed.reason


def test_a_named_snapshot_that_parts_after_user_start(make_world: Callable[..., World]) -> None:
    world = make_world("hybrid", disk=False)
    capture = saved(world)
    expect_start(world, world.find(STRANGER, restore_from=capture.snapshot_id, needs_state=True), capture)


def test_a_state_without_its_place_is_not_kept(make_world: Callable[..., World]) -> None:
    world = make_world("hybrid", disk=False)
    capture = world.capture(PROMPT, start_slot=2, slot=1)
    world.service.save(replace(capture, user_start=None))
    assert world.service.flush(240)
    record = world.service.get("default", capture.snapshot_id)
    assert record.bytes == HYBRID.kv_bytes_per_token * 290 + HYBRID.state_bytes + 4 * 290
