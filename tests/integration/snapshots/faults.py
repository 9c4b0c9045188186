"""Filesystems that die or fail at the n-th mutating call, and the work that is interrupted (run in another process)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engram_runtime.snapshots.io.filesystem import FileSystem
from engram_runtime.snapshots.io.local_store import LocalStore
from tests.support.snapshots import LAYOUTS, World, tokens

PROMPT = tokens(400, seed=11)
FIRST, SECOND = 150, 330
STEPS = ("make_directory", "create", "write", "sync", "sync_directory", "rename", "link", "unlink", "touch")


class StepFileSystem(FileSystem):
    """Calls `at(step, name)` before each mutating call once `counting`; a write is cut in half if `at` asks for it."""

    def __init__(self, at: Callable[[int, str], str | None]) -> None:
        self.at = at
        self.counting = False
        self.steps: list[str] = []

    def step(self, name: str) -> str | None:
        if not self.counting:
            return None
        self.steps.append(name)
        return self.at(len(self.steps) - 1, name)

    def make_directory(self, path: Path) -> None:
        self.step("make_directory")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self.step("create")
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.step("write") == "torn":
            os.write(descriptor, data[: len(data) // 2])
            die()
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self.step("sync")
        super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        self.step("sync_directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self.step("rename")
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.step("link")
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self.step("unlink")
        super().unlink(path)

    def touch(self, path: Path) -> None:
        self.step("touch")
        super().touch(path)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def open_world(root: Path, layout: str, tiers: tuple[str, ...], filesystem: FileSystem | None = None) -> World:
    return World(
        root,
        LAYOUTS[layout],
        disk="disk" in tiers,
        store="store" in tiers,
        disk_store=LocalStore(root / "disk", filesystem) if "disk" in tiers else None,
        shared_store=LocalStore(root / "store", filesystem) if "store" in tiers else None,
    )


def first_turn(world: World) -> Any:
    return world.save(PROMPT[:FIRST], user_start=40, slot=1)


def second_turn(world: World, parent: str) -> Any:
    return world.save(PROMPT[:SECOND], turn=2, parent=parent, user_start=FIRST + 20, slot=2)


def interrupted(root: str, layout: str, tiers: tuple[str, ...], job: str, parent: str, step: int, torn: bool) -> None:
    """Do `job` and be killed at mutating call number `step` (never, when there are fewer): a process's whole life."""

    def at(number: int, name: str) -> str | None:
        if number == step:
            if torn and name == "write":
                return "torn"
            die()
        return None

    filesystem = StepFileSystem(at)
    world = open_world(Path(root), layout, tiers, filesystem)
    filesystem.counting = True
    run_job(world, job, parent)
    os._exit(0)


def run_job(world: World, job: str, parent: str) -> None:
    if job == "save":
        second_turn(world, parent)
    elif job == "delete":
        world.service.delete("default", parent)
    else:
        # The service was opened with its usual grace, which protects everything so young.
        world.service._sweeper._config = replace(world.config, gc_grace_seconds=0)
        world.service.sweep()
