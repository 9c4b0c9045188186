"""Several writers on one conversation: heads move by compare-and-swap, the loser becomes a branch, nothing is lost."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engram_runtime.errors import Conflict
from engram_runtime.snapshots.io.local_store import LocalStore
from tests.support.snapshots import DENSE, HYBRID, Device, World, tokens

PROMPT = tokens(600, seed=21)


def pair(make_world: Callable[..., World], tmp_path: Path, layout: str = "dense") -> tuple[World, World]:
    """Two replicas over one store, each with its own disk."""
    device = Device(HYBRID if layout == "hybrid" else DENSE)
    worlds = []
    for name in ("a", "b"):
        world = make_world(layout, root=tmp_path / name, device=device)
        world.shared_store = LocalStore(tmp_path / "store")
        world.start()
        worlds.append(world)
    return worlds[0], worlds[1]


@pytest.mark.parametrize("layout", ["dense", "hybrid"])
def test_two_replicas_answer_the_same_turn(make_world: Callable[..., World], tmp_path: Path, layout: str) -> None:
    a, b = pair(make_world, tmp_path, layout)
    first = a.save(PROMPT[:100])
    b.check(b.find(PROMPT, conversation_id="c"), first)
    on_a = a.save(PROMPT[:200], turn=2, parent=first.snapshot_id)
    other = PROMPT[:100] + tokens(120, seed=3)
    on_b = b.save(other, turn=2, parent=first.snapshot_id)
    assert a.results[on_a.snapshot_id].branch_name == "main"
    lost = b.results[on_b.snapshot_id].branch_name
    assert lost.startswith("main~")
    assert a.service.resolve("default", "c").snapshot_id == on_a.snapshot_id
    assert b.service.resolve("default", "c").snapshot_id == on_a.snapshot_id
    info = a.service.get("default", on_b.snapshot_id)
    assert (info.branch_name, info.is_head) == (lost, True)
    saved = {e.snapshot_id: e.info for e in a.service.events("default").events}
    assert saved[on_b.snapshot_id].branch_name == lost  # type: ignore[union-attr]
    # the losing conversation goes on, on its branch, on its replica and after its restart
    third = b.save([*other, *tokens(50, seed=4)], turn=3, parent=on_b.snapshot_id)
    assert b.results[third.snapshot_id].branch_name == lost
    b.start()
    found = b.find([*other, *tokens(60, seed=4)], conversation_id="c", branch_name=lost)
    b.check(found, third)
    assert found.branch_name == lost
    for world in (a, b):
        assert all(report.ok for report in world.service.fsck())


def test_the_disk_learns_the_branch_that_the_store_gave(make_world: Callable[..., World], tmp_path: Path) -> None:
    a, b = pair(make_world, tmp_path)
    first = a.save(PROMPT[:100])
    b.find(PROMPT, conversation_id="c")
    a.save(PROMPT[:200], turn=2, parent=first.snapshot_id)
    on_b = b.save(PROMPT[:100] + tokens(120, seed=3), turn=2, parent=first.snapshot_id)
    lost = b.results[on_b.snapshot_id].branch_name
    b.shared_store = None
    b.store = False
    b.start()
    assert b.service.get("default", on_b.snapshot_id).branch_name == lost
    assert b.service.resolve("default", "c", branch_name=lost).snapshot_id == on_b.snapshot_id


def test_boundaries_of_one_turn_do_not_branch(make_world: Callable[..., World]) -> None:
    """A template that strips thinking: turn_end is no prefix of next_history, and turn 2 comes from history."""
    world = make_world("hybrid")
    base = PROMPT[:100]
    history = world.save(base, boundary="history", durable=False)
    turn_end = world.save([*base, *tokens(50, seed=1)], parent=history.snapshot_id)
    stripped = [*base, *tokens(20, seed=2)]
    rewarmed = world.save(stripped, boundary="next_history", parent=turn_end.snapshot_id)
    assert world.results[rewarmed.snapshot_id].branch_name == "main"
    second = world.save([*stripped, *tokens(60, seed=5)], turn=2, parent=rewarmed.snapshot_id)
    from_history = world.save([*base, *tokens(90, seed=6)], "d", boundary="history", durable=False)
    world.save([*base, *tokens(90, seed=6), *tokens(9, seed=7)], "d", parent=from_history.snapshot_id)
    late = world.save([*base, *tokens(90, seed=6), *tokens(9, seed=8)], "d", turn=2, parent=from_history.snapshot_id)
    for capture in (turn_end, second, late):
        assert world.results[capture.snapshot_id].branch_name == "main"
    assert world.service.resolve("default", "c").snapshot_id == second.snapshot_id
    assert world.service.resolve("default", "d").snapshot_id == late.snapshot_id


def test_a_turn_stored_after_its_continuation(make_world: Callable[..., World]) -> None:
    """The engine may hold a turn back for a moment, and the next one overtakes it: no branch, and the head stays."""
    world = make_world("dense")
    first = world.save(PROMPT[:100])
    held = world.capture(PROMPT[:200], turn=2, parent=first.snapshot_id)
    third = world.save([*PROMPT[:180], *tokens(90, seed=1)], turn=3, parent=held.snapshot_id)
    world.service.save(held)
    assert world.service.flush(240)
    assert world.results[third.snapshot_id].branch_name == "main"
    assert world.results[held.snapshot_id].branch_name == "main"
    assert world.service.resolve("default", "c").snapshot_id == third.snapshot_id
    assert world.service.resolve("default", "c", 2).snapshot_id == held.snapshot_id
    assert world.service.set_head("default", held.snapshot_id).is_head


def test_a_head_that_is_not_there_opens_no_branch(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    first = world.save(PROMPT[:100])
    second = world.save([*PROMPT[:100], *tokens(30, seed=1)], turn=2, parent=first.snapshot_id)
    world.start()
    for root in (world.disk_path, world.store_path):
        next(root.rglob(f"snap/*/{second.snapshot_id}")).unlink()
    assert world.service.resolve("default", "c").snapshot_id == first.snapshot_id
    again = world.save(PROMPT[:200], turn=2, parent=first.snapshot_id)
    assert world.results[again.snapshot_id].branch_name == "main"
    assert world.service.resolve("default", "c").snapshot_id == again.snapshot_id
    assert all(report.ok for report in world.service.fsck())


def test_regenerate_opens_a_branch(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    first = world.save(PROMPT[:100])
    second = world.save(PROMPT[:200], turn=2, parent=first.snapshot_id)
    again = world.save([*PROMPT[:150], *tokens(40, seed=1)], turn=2, parent=first.snapshot_id)
    assert world.results[second.snapshot_id].branch_name == "main"
    assert world.results[again.snapshot_id].branch_name.startswith("main~")
    back = world.service.set_head("default", first.snapshot_id)
    assert back.is_head
    third = world.save([*PROMPT[:100], *tokens(70, seed=2)], turn=2, parent=first.snapshot_id)
    assert world.results[third.snapshot_id].branch_name == "main"


def test_swap_between_threads(tmp_path: Path) -> None:
    """Of many swaps from one tag exactly one wins."""
    store = LocalStore(tmp_path)
    tag = store.compare_and_swap("ref", b"0", None)
    for round_number in range(20):
        wins: list[str] = []

        def swap(name: bytes, tag: str = tag, wins: list[str] = wins) -> None:
            with suppress(Conflict):
                wins.append(store.compare_and_swap("ref", name, tag))

        threads = [threading.Thread(target=swap, args=(f"{round_number}-{n}".encode(),)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wins) == 1
        tag = wins[0]


def count_up(root: str, rounds: int) -> None:
    store = LocalStore(Path(root))
    for _ in range(rounds):
        while True:
            data, tag = store.get_tagged("counter")
            try:
                store.compare_and_swap("counter", str(int(data) + 1).encode(), tag)
                break
            except Conflict:
                continue


def test_swap_between_processes(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("counter", [b"0"])
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=count_up, args=(str(tmp_path), 20)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    assert LocalStore(tmp_path).get("counter") == b"60"


def chat(root: str, name: str, turns: int) -> None:
    """One writer of conversation "c": own disk, shared store, turns as fast as it can."""
    world = World(Path(root) / name, DENSE, shared_store=LocalStore(Path(root) / "store"))
    prompt = tokens(80, seed=1)
    parent = None
    for turn in range(1, turns + 1):
        prompt = [*prompt, *tokens(30, seed=hash((name, turn)) % 1000)]
        capture = world.save(prompt, turn=turn, parent=parent)
        assert world.results[capture.snapshot_id].tiers == ("host", "disk", "store")
        parent = capture.snapshot_id
    world.service.close()


def test_two_processes_on_one_conversation(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=chat, args=(str(tmp_path), name, 12)) for name in ("a", "b")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    world = World(tmp_path / "c", DENSE, shared_store=LocalStore(tmp_path / "store"))
    try:
        branches: dict[str, list[int]] = {}
        for info in world.service.list("default", limit=100).items:
            branches.setdefault(info.branch_name, []).append(info.turn_number)
        assert sum(len(turns) for turns in branches.values()) == 24
        assert len(branches) >= 2
        for branch in branches:
            assert world.service.resolve("default", "c", branch_name=branch).turn_number == max(branches[branch])
        assert all(report.ok for report in world.service.fsck())
    finally:
        world.service.close()


def test_same_prompt_on_two_replicas_shares_its_files(make_world: Callable[..., World], tmp_path: Path) -> None:
    a, b = pair(make_world, tmp_path)
    a.save(PROMPT[:300], "one")
    written = b.service.counters().get("bytes_written.store", 0)
    capture: Any = b.save(PROMPT[:300], "two")
    assert b.results[capture.snapshot_id].tiers == ("host", "disk", "store")
    assert len(list((tmp_path / "store").rglob("kv/*/*"))) == 1
    assert b.service.counters()["touches.store"] >= 1
    assert written == 0
