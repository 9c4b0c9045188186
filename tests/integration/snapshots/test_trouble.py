"""Tiers in trouble: full, unwritable, gone, slow. The engine never sees it; the status does."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.io.store import StoreUnavailable
from engram_runtime.snapshots.types import Fetched, Miss, SaveResult, TierStatus
from tests.integration.snapshots.faults import (
    FIRST,
    PROMPT,
    SECOND,
    StepFileSystem,
    first_turn,
    second_turn,
)
from tests.support.snapshots import DENSE, RecordingStore, World, tokens
from tests.support.stopwatch import Stopwatch


def tier(world: World, name: str) -> TierStatus:
    return next(status for status in world.service.status() if status.name == name)


def unpause(world: World) -> None:
    for each in world.service._shared.tiers:
        each.writes._until = each.reads._until = 0.0


def stop_pauses(world: World) -> None:
    """A tier in trouble stays so until `unpause`: on a busy machine a second is over before anybody has looked."""
    for each in world.service._shared.tiers:
        each.writes._clock = each.reads._clock = lambda: 0.0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
def test_disk_failing_at_every_step(tmp_path: Path, code: int) -> None:
    """Whatever call fails, the store has the snapshot, the disk is off with a reason, and the next save heals it."""
    reason = {errno.ENOSPC: "DiskFull", errno.EDQUOT: "DiskFull", errno.EACCES: "Unwritable"}.get(code, "InputOutput")
    step = 0
    stride = 1 if code == errno.ENOSPC else 7  # they differ in their names only
    failed = True
    while failed:
        failed = False
        fail_at = step

        def at(number: int, name: str, fail_at: int = fail_at) -> None:
            nonlocal failed
            if number == fail_at:
                failed = True
                raise OSError(code, os.strerror(code))

        root = tmp_path / str(step)
        filesystem = StepFileSystem(at)
        world = World(root, DENSE, disk_store=LocalStore(root / "disk", filesystem))
        stop_pauses(world)
        first = first_turn(world)
        filesystem.counting = True
        second = second_turn(world, first.snapshot_id)
        assert "store" in world.results[second.snapshot_id].tiers
        if failed and "disk" not in world.results[second.snapshot_id].tiers:
            assert tier(world, "disk").ready is False
            assert tier(world, "disk").reason == reason
        filesystem.counting = False
        unpause(world)
        third = world.save(PROMPT[:390], turn=3, parent=second.snapshot_id)
        assert world.results[third.snapshot_id].tiers == ("host", "disk", "store")
        assert tier(world, "disk").ready
        world.store = False
        world.start()
        world.check(world.find(PROMPT, candidates=(390,)), third)
        assert all(report.ok for report in world.service.fsck())
        world.service.close()
        step += stride
    assert step > 20


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tiny"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_really_full_disk(tiny_disk: Path, tmp_path: Path) -> None:
    world = World(tmp_path, DENSE, disk_store=LocalStore(tiny_disk / "disk"))
    stop_pauses(world)  # what was not written leaves room for a try, and a tier that passes it is ready for a moment
    try:
        saves = []
        for number in range(8):
            prompt = tokens(1000, seed=number)
            saves.append((prompt, world.save(prompt, f"c{number}")))
        assert not tier(world, "disk").ready
        assert tier(world, "disk").reason == "DiskFull"
        assert tier(world, "store").ready
        for number, (_, capture) in enumerate(saves):
            assert "store" in world.results[capture.snapshot_id].tiers
            if number == 0:
                assert world.results[capture.snapshot_id].tiers == ("host", "disk", "store")
        world.disk_store = LocalStore(tiny_disk / "disk")
        world.start()
        for prompt, capture in saves:
            world.check(world.find([*prompt, 1], candidates=(1000,)), capture)
        assert all(report.ok for report in world.service.fsck())
    finally:
        world.service.close()


def test_unwritable_folder_at_start(tmp_path: Path, make_world: Callable[..., World]) -> None:
    (tmp_path / "disk").write_text("not a folder")
    world = make_world("dense")
    assert not tier(world, "disk").ready
    assert tier(world, "disk").reason == "FolderMissing"
    saved = world.save(tokens(100)[:90])
    assert world.results[saved.snapshot_id].tiers == ("host", "store")
    world.check(world.find(tokens(100)), saved)


def test_quota_evicts_the_least_recently_used(make_world: Callable[..., World]) -> None:
    world = make_world("dense", store=False)
    sizes = []
    prompts = [tokens(2000, seed=n) for n in range(6)]
    world.save(prompts[0], "c0")
    sizes.append(sum(p.stat().st_size for p in world.disk_path.rglob("v1/**/*") if p.is_file()))
    world.start(disk_bytes=int(sizes[0] * 5))
    for number in range(1, 6):
        if number == 3:
            os.utime(next(world.disk_path.rglob("snap/**/" + world.service.resolve("default", "c0").snapshot_id)))
        world.save(prompts[number], f"c{number}")
        time.sleep(0.02)
    used = sum(p.stat().st_size for p in world.disk_path.rglob("v1/**/*") if p.is_file())
    assert used <= sizes[0] * 5
    world.start()
    kept = [n for n in range(6) if isinstance(world.find([*prompts[n], 1], candidates=(2000,)), Fetched)]
    assert 5 in kept
    assert 0 in kept
    assert 1 not in kept
    assert all(report.ok for report in world.service.fsck())


def test_quota_keeps_what_is_pinned_and_refuses_what_cannot_fit(make_world: Callable[..., World]) -> None:
    world = make_world("dense", store=False)
    world.start(disk_bytes=150_000)
    pinned = world.save(tokens(600, seed=1), "pinned", pin=True)
    assert "disk" in world.results[pinned.snapshot_id].tiers
    second = world.save(tokens(2000, seed=2), "big")
    assert world.results[second.snapshot_id].tiers == ("host",)
    assert "quota" in world.results[second.snapshot_id].reason
    assert tier(world, "disk").ready
    for number in range(5):
        world.save(tokens(600, seed=10 + number), f"c{number}")
    world.start()
    world.check(world.find([*tokens(600, seed=1), 1], candidates=(600,)), pinned)


def test_store_away_then_back(tmp_path: Path, make_world: Callable[..., World]) -> None:
    """Turns go on, saves wait, the head is right afterwards; nothing raises into the engine."""
    spy = RecordingStore(LocalStore(tmp_path / "store"))
    world = make_world("dense", disk=False, shared_store=spy)
    first = first_turn(world)

    def away(call: str, key: str) -> None:
        raise StoreUnavailable("ServiceUnavailable", "503 Slow Down")

    spy.fail = away
    second = world.capture(PROMPT[:SECOND], turn=2, parent=first.snapshot_id)
    world.service.save(second)
    third = world.capture(PROMPT[:390], turn=3, parent=second.snapshot_id)
    world.service.save(third)
    assert world.service.gathered(240)
    deadline = time.monotonic() + 240
    while tier(world, "store").ready and time.monotonic() < deadline:
        time.sleep(0.05)
    assert tier(world, "store").reason == "ServiceUnavailable"
    world.check(world.find(PROMPT), third)
    assert isinstance(world.find(tokens(50, seed=99), candidates=(20,), conversation_id="x"), Miss)
    assert sorted(world.released) == sorted([first.snapshot_id, second.snapshot_id, third.snapshot_id])
    spy.fail = None
    assert world.service.flush(240)
    assert world.results[third.snapshot_id].tiers == ("host", "store")
    assert world.results[third.snapshot_id].branch_name == "main"
    assert tier(world, "store").ready
    world.start()
    assert world.service.resolve("default", "c").turn_number == 3
    world.check(world.find(PROMPT, conversation_id="c"), third)


def test_a_deletion_that_the_store_did_not_hear_of(tmp_path: Path, make_world: Callable[..., World]) -> None:
    spy = RecordingStore(LocalStore(tmp_path / "store"))
    world = make_world("dense", shared_store=spy)
    saved = world.save(PROMPT[:FIRST])

    def away(call: str, key: str) -> None:
        raise StoreUnavailable("Down", "connection refused")

    spy.fail = away
    for _ in range(2):  # a second try is an error again, not a 404 that would mean it is done
        with pytest.raises(SnapshotError, match="not yet on tier store") as caught:
            world.service.delete("default", saved.snapshot_id)
        assert not isinstance(caught.value, NotFound)
    with pytest.raises(NotFound):
        world.service.get("default", saved.snapshot_id)
    assert isinstance(world.find(PROMPT, candidates=(FIRST,)), Miss)
    spy.fail = None
    unpause(world)
    world.service._keeper.poll()
    assert list((tmp_path / "store").rglob("snap/*/*")) == []
    with pytest.raises(NotFound):
        world.service.delete("default", saved.snapshot_id)


def test_store_error_on_every_call(tmp_path: Path) -> None:
    """One failing request anywhere in a save is retried; in a restore it is a Miss or an older boundary."""
    call = 0
    failed = True
    while failed:
        failed = False
        root = tmp_path / str(call)
        spy = RecordingStore(LocalStore(root / "store"))
        world = World(root, DENSE, disk=False, shared_store=spy)
        first = first_turn(world)
        start = len(spy.calls)

        def once(name: str, key: str, spy: RecordingStore = spy, last: int = start + call) -> None:
            nonlocal failed
            if len(spy.calls) - 1 == last:
                failed = True
                raise StoreUnavailable("InternalError", "500")

        spy.fail = once
        second = second_turn(world, first.snapshot_id)
        assert world.results[second.snapshot_id].tiers == ("host", "store")
        assert world.results[second.snapshot_id].branch_name == "main"
        spy.fail = None
        world.start()
        world.check(world.find(PROMPT, candidates=(SECOND, FIRST), conversation_id="c"), second)
        assert all(report.ok for report in world.service.fsck())
        world.service.close()
        call += 1
    assert call >= 6


def test_a_slow_store_is_left_at_the_deadline(tmp_path: Path, make_world: Callable[..., World]) -> None:
    spy = RecordingStore(LocalStore(tmp_path / "store"))
    world = make_world("dense", disk=False, shared_store=spy)
    world.save(PROMPT[:SECOND])
    world.start()
    hold = threading.Event()
    spy.fail = lambda call, key: hold.wait(240) if "/kv/" in key or "/anchor/" in key else None
    with Stopwatch() as watch:
        missed = world.find(PROMPT, candidates=(SECOND,), deadline_seconds=0.3)
    assert watch.seconds < 3
    assert isinstance(missed, Miss)
    assert "deadline" in missed.reason
    hold.set()


def test_slower_than_prefill_is_refused(make_world: Callable[..., World]) -> None:
    world = make_world("dense", disk=False)
    saved = world.save(PROMPT[:SECOND])
    world.start()
    query = {"candidates": (SECOND,), "prefill_tokens_per_second": 20_000.0}
    store = world.service._shared.tiers[0]
    store.speed.bytes_per_second, store.speed.measured = 1e4, True
    refused = world.find(PROMPT, **query)
    assert isinstance(refused, Miss)
    assert "would take" in refused.reason
    assert not refused.failed
    world.check(world.find(PROMPT, restore_from=saved.snapshot_id, **query), saved)
    world.start()
    store = world.service._shared.tiers[0]
    store.speed.latency_seconds = 10.0
    gets = world.service.counters().get("gets.store", 0)
    missed = world.find(PROMPT, conversation_id="c", **query)
    assert isinstance(missed, Miss)
    assert "asking would take" in missed.reason
    assert world.service.counters().get("gets.store", 0) == gets


def test_full_queue_drops_and_releases(make_world: Callable[..., World]) -> None:
    world = make_world("dense", disk=False, store=False)
    world.start(queue_captures=2, save_workers=1)
    hold = threading.Event()
    read = world.device.read_kv
    world.device.read_kv = lambda *args: (hold.wait(240), read(*args))[1]  # type: ignore[method-assign]
    captures = [world.capture(tokens(50, seed=n), f"c{n}") for n in range(5)]
    for capture in captures:
        world.service.save(capture)
    dropped = [c for c in captures if c.snapshot_id in world.results and world.results[c.snapshot_id].tiers == ()]
    assert len(dropped) == 3
    assert {world.results[c.snapshot_id].reason for c in dropped} == {"queue_full"}
    hold.set()
    assert world.service.flush(240)
    assert sorted(world.released) == sorted(c.snapshot_id for c in captures)
    assert world.service.counters()["saves_dropped"] == 3


def test_a_failing_device_releases_and_says_so(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    capture = world.capture(tokens(50))

    def broken(*args: object) -> object:
        raise RuntimeError("CUDA error")

    world.device.read_kv = world.device.read_state = broken  # type: ignore[method-assign, assignment]
    world.service.save(capture)
    assert world.service.flush(240)
    assert world.released == [capture.snapshot_id]
    assert "CUDA error" in world.results[capture.snapshot_id].reason
    assert isinstance(world.find(tokens(60)), Miss)


def test_close_releases_what_waits(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    world.start(save_workers=1)
    hold = threading.Event()
    read = world.device.read_kv
    world.device.read_kv = lambda *args: (hold.wait(240), read(*args))[1]  # type: ignore[method-assign]
    captures = [world.capture(tokens(50, seed=n)) for n in range(3)]
    for capture in captures:
        world.service.save(capture)
    closer = threading.Thread(target=world.service.close)
    closer.start()
    assert world.service._saver._closing.wait(240)
    hold.set()
    closer.join(240)
    assert sorted(world.released) == sorted(c.snapshot_id for c in captures)
    late = world.capture(tokens(50, seed=9))
    world.service.save(late)
    assert late.snapshot_id in world.released


def test_who_waits_for_saves_has_been_told_how_they_ended(make_world: Callable[..., World]) -> None:
    """On which branch a turn is, for one: its next turn, which comes after the wait, must go on there."""
    world = make_world("dense")
    capture = world.capture(PROMPT[:FIRST])
    told, tell = threading.Event(), capture.on_done

    def late(result: SaveResult) -> None:
        told.wait(0.5)
        assert tell is not None
        tell(result)

    capture.on_done = late
    world.service.save(capture)
    assert world.service.flush(240)
    assert world.results[capture.snapshot_id].tiers == ("host", "disk", "store")


def test_one_read_for_many_requests(tmp_path: Path, make_world: Callable[..., World]) -> None:
    spy = RecordingStore(LocalStore(tmp_path / "store"))
    world = make_world("hybrid", disk=False, shared_store=spy)
    saved = world.save(PROMPT[:SECOND], slot=3)
    world.start()
    spy.fail = lambda call, key: time.sleep(0.2) if "/kv/" in key else None
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(world.find(PROMPT, conversation_id="c"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fetched in found:
        world.check(fetched, saved)
    assert len([key for call, key in spy.calls if call == "get" and "/kv/" in key]) == 1


def test_errors_that_callers_see_are_snapshot_errors(tmp_path: Path, make_world: Callable[..., World]) -> None:
    spy = RecordingStore(LocalStore(tmp_path / "store"))
    world = make_world("dense", disk=False, shared_store=spy)
    saved = world.save(PROMPT[:FIRST])
    world.start()

    def away(call: str, key: str) -> None:
        raise StoreUnavailable("Down", "connection refused")

    spy.fail = away
    for call in (world.service.get, world.service.content, world.service.delete, world.service.prefetch):
        with pytest.raises(SnapshotError):
            call("default", saved.snapshot_id)
    assert world.service.events("default").events == []
    assert world.service.list("default").items == []


def test_a_tier_that_answers_again_is_back_within_seconds(tmp_path: Path, make_world: Callable[..., World]) -> None:
    """However long it was away, whatever it was that failed, and though nobody saves or restores."""
    spy = RecordingStore(LocalStore(tmp_path / "store"))
    world = make_world("dense", disk=False, shared_store=spy)
    (store,) = world.service._shared.tiers

    def away(call: str, key: str) -> None:
        raise StoreUnavailable("Timeout", "no answer")

    for failing in ((store.writes, store.reads), (store.reads,), (store.writes,)):
        spy.fail = away
        for breaker in failing:
            for _ in range(12):
                breaker.failed("Timeout", "no answer")
        assert (tier(world, "store").ready, tier(world, "store").reason) == (False, "Timeout")
        spy.fail = None
        with Stopwatch() as watch:
            while not tier(world, "store").ready:
                assert watch.whole < 240
                time.sleep(0.01)
        assert watch.seconds < 10
