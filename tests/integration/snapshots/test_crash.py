"""kill -9 at every write, fsync, rename, link, unlink and mkdir of a save, a deletion and a sweep."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from engram_runtime.errors import NotFound
from engram_runtime.snapshots.types import Fetched
from tests.integration.snapshots.faults import (
    FIRST,
    PROMPT,
    SECOND,
    StepFileSystem,
    first_turn,
    interrupted,
    open_world,
    run_job,
    second_turn,
)

CASES = [("dense", ("disk",)), ("hybrid", ("store",)), ("hybrid", ("disk", "store"))]


def count_steps(template: Path, scratch: Path, layout: str, tiers: tuple[str, ...], job: str, parent: str) -> list[str]:
    root = scratch / "count"
    shutil.copytree(template, root)
    filesystem = StepFileSystem(lambda number, name: None)
    world = open_world(root, layout, tiers, filesystem)
    filesystem.counting = True
    run_job(world, job, parent)
    world.service.close()
    return filesystem.steps


def kill_at(root: Path, layout: str, tiers: tuple[str, ...], job: str, parent: str, step: int, torn: bool) -> bool:
    """True when the process was killed, False when it had no such step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.snapshots.faults"])
    process = context.Process(target=interrupted, args=(str(root), layout, tiers, job, parent, step, torn))
    process.start()
    process.join(600)
    assert process.exitcode in (-signal.SIGKILL, 0)
    return process.exitcode != 0


@pytest.mark.parametrize(("layout", "tiers"), CASES)
def test_save(tmp_path: Path, layout: str, tiers: tuple[str, ...]) -> None:
    template = tmp_path / "template"
    world = open_world(template, layout, tiers)
    first = first_turn(world)
    world.service.close()
    steps = count_steps(template, tmp_path, layout, tiers, "save", first.snapshot_id)
    assert {"create", "write", "sync", "rename", "link", "sync_directory"} <= set(steps)
    outcomes = set()
    for step, name in enumerate(steps):
        for torn in (False, True) if name == "write" else (False,):
            root = tmp_path / f"{step}-{torn}"
            shutil.copytree(template, root)
            assert kill_at(root, layout, tiers, "save", first.snapshot_id, step, torn)
            outcomes.add(check_after_save(root, layout, tiers, first))
            shutil.rmtree(root)
    assert outcomes == {"old", "new"}


def check_after_save(root: Path, layout: str, tiers: tuple[str, ...], first: object) -> str:
    """A fresh process sees the old head or the new one, nothing torn, and goes on saving."""
    world = open_world(root, layout, tiers)
    try:
        head = world.service.resolve("default", "c")
        assert head.turn_number in (1, 2)
        found = world.find(PROMPT, candidates=(SECOND, FIRST), conversation_id="c")
        assert isinstance(found, Fetched), found
        assert found.position in (FIRST, SECOND)
        world.check(found, world.capture(PROMPT[: found.position], slot=1 if found.position == FIRST else 2))
        for report in world.service.fsck():
            assert report.ok, report.problems
        again = second_turn(world, world.service.resolve("default", "c", 1).snapshot_id)
        assert world.results[again.snapshot_id].branch_name.startswith("main")
        world.start()
        world.check(world.find(PROMPT, candidates=(SECOND,), conversation_id="c"), again)
        assert world.service.resolve("default", "c").turn_number == 2
        return "old" if head.turn_number == 1 else "new"
    finally:
        world.service.close()


@pytest.mark.parametrize(("layout", "tiers"), CASES[:2])
def test_delete(tmp_path: Path, layout: str, tiers: tuple[str, ...]) -> None:
    template = tmp_path / "template"
    world = open_world(template, layout, tiers)
    first = first_turn(world)
    second = second_turn(world, first.snapshot_id)
    world.service.close()
    steps = count_steps(template, tmp_path, layout, tiers, "delete", second.snapshot_id)
    for step in range(len(steps)):
        root = tmp_path / str(step)
        shutil.copytree(template, root)
        assert kill_at(root, layout, tiers, "delete", second.snapshot_id, step, False)
        world = open_world(root, layout, tiers)
        world.check(world.find(PROMPT[: FIRST + 1], candidates=(FIRST,)), first)
        for report in world.service.fsck():
            assert report.ok, (steps[step], report.problems)
        with suppress(NotFound):
            world.service.delete("default", second.snapshot_id)
        with pytest.raises(NotFound):
            world.service.get("default", second.snapshot_id)
        assert world.service.resolve("default", "c").snapshot_id == first.snapshot_id
        world.service.close()
        shutil.rmtree(root)


@pytest.mark.parametrize(("layout", "tiers"), CASES[:2])
def test_sweep(tmp_path: Path, layout: str, tiers: tuple[str, ...]) -> None:
    """Retention lets turn 1 go (keep_last = 1); turn 2, which shares its pieces, is whole after a kill at any step."""
    template = tmp_path / "template"
    world = open_world(template, layout, tiers)
    second = second_turn(world, first_turn(world).snapshot_id)
    world.service.close()
    steps = count_steps(template, tmp_path, layout, tiers, "sweep", second.snapshot_id)
    assert "unlink" in steps
    for step in range(len(steps)):
        root = tmp_path / str(step)
        shutil.copytree(template, root)
        assert kill_at(root, layout, tiers, "sweep", second.snapshot_id, step, False)
        world = open_world(root, layout, tiers)
        world.check(world.find(PROMPT, candidates=(SECOND,)), second)
        for report in world.service.fsck():
            assert report.ok, report.problems
        run_job(world, "sweep", second.snapshot_id)
        world.start()
        world.check(world.find(PROMPT, candidates=(SECOND,)), second)
        assert [info.snapshot_id for info in world.service.list("default").items] == [second.snapshot_id]
        world.service.close()
        shutil.rmtree(root)
