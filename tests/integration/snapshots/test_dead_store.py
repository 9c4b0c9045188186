"""A store that is dead, and one that comes back: nobody waits for what cannot happen, and nothing waits for a user."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.io.store import StoreUnavailable
from engram_runtime.snapshots.tiers import MeteredStore
from engram_runtime.snapshots.types import TierStatus
from tests.support.snapshots import RecordingStore, World, tokens

PROMPT = tokens(300)
ADDRESS = "http://10.1.2.3:9000/bucket"


def dead(call: str, key: str) -> None:
    raise StoreUnavailable("Unreachable", f"could not connect to {ADDRESS}")


@pytest.fixture
def store(tmp_path: Path) -> RecordingStore:
    return RecordingStore(LocalStore(tmp_path / "shared"))


def status(world: World, tier: str) -> TierStatus:
    return next(found for found in world.service.status() if found.name == tier)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_drain_does_not_wait_for_a_dead_store(make_world: Callable[..., World], store: RecordingStore) -> None:
    world = make_world("dense", disk=False, shared_store=store)
    store.fail = dead
    for number in range(3):
        world.service.save(world.capture(PROMPT[: 100 + number], f"conversation {number}"))
    started = time.monotonic()
    assert not world.service.flush(600)
    assert time.monotonic() - started < 60
    store.fail = None
    assert world.service.flush(240)  # the pause is not waited for either
    assert len(world.service.list("default").items) == 3


def test_a_drain_waits_for_a_store_that_only_stumbles(make_world: Callable[..., World], store: RecordingStore) -> None:
    world = make_world("dense", disk=False, shared_store=store)
    left = [2]

    def stumble(call: str, key: str) -> None:
        if call == "put" and left[0]:
            left[0] -= 1
            dead(call, key)

    store.fail = stumble
    world.service.save(world.capture(PROMPT))
    assert world.service.flush(240)


def test_a_disk_that_is_back_gets_what_it_missed(make_world: Callable[..., World], tmp_path: Path) -> None:
    """Without another turn and without a restore."""
    disk = RecordingStore(LocalStore(tmp_path / "fast"))
    world = make_world("dense", disk_store=disk)
    disk.fail = dead
    capture = world.save(PROMPT)
    assert world.service.get("default", capture.snapshot_id).tiers == ("host", "store")
    assert not status(world, "disk").ready
    wait_for(lambda: world.service._behind)
    disk.fail = None
    wait_for(lambda: world.service.get("default", capture.snapshot_id).tiers == ("host", "disk", "store"))
    assert status(world, "disk").ready


def test_users_are_not_told_addresses(make_world: Callable[..., World], store: RecordingStore) -> None:
    """The operator is."""
    world = make_world("dense", disk=False, shared_store=store)
    kept = world.save(PROMPT[:200])
    lost = world.capture(PROMPT[:250], "other", durable=False)
    world.service.save(lost)
    assert world.service.gathered(240)
    world.only_host()
    store.fail = dead
    told = [
        world.find(PROMPT, candidates=(200,)).reason,
        world.find(PROMPT, conversation_id="c").reason,
        world.find(PROMPT, restore_from=kept.snapshot_id).reason,
    ]
    for words in told:
        assert "Unreachable" in words
        assert ADDRESS not in words
    store.fail = None
    wait_for(lambda: status(world, "store").ready)
    assert world.service.get("default", kept.snapshot_id)
    store.fail = dead
    for _ in range(3):
        with pytest.raises(SnapshotError) as caught:
            world.service.delete("default", kept.snapshot_id)
        assert ADDRESS not in str(caught.value)
    assert ADDRESS in status(world, "store").message


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until a service that has begun says what it found in its store; what is written meanwhile is not in it."""
    said = threading.Semaphore(0)
    holds = MeteredStore.holds

    def tell(self: MeteredStore, objects: int, nbytes: int) -> None:
        holds(self, objects, nbytes)
        if threading.current_thread().name == "engram-snapshots":
            said.release()

    monkeypatch.setattr(MeteredStore, "holds", tell)

    def wait() -> None:
        assert said.acquire(timeout=240)

    return wait


def test_the_store_says_what_it_holds(
    make_world: Callable[..., World], store: RecordingStore, counted: Callable[[], None]
) -> None:
    world = make_world("dense", disk=False, shared_store=store)
    counted()
    world.save(PROMPT)
    written = status(world, "store")
    assert written.objects == 2
    assert written.bytes > world.layout.kv_bytes_per_token * len(PROMPT)
    world.start()
    counted()
    assert status(world, "store").objects == 2
    assert status(world, "store").bytes >= written.bytes
    world.service.delete("default", world.service.resolve("default", "c").snapshot_id)
    world.config = replace(world.config, gc_grace_seconds=0)
    world.start()
    counted()
    world.service.sweep()
    world.service.sweep()
    assert status(world, "store").objects == 0
