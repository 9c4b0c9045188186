"""Worlds that are closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.snapshots import LAYOUTS, World


@pytest.fixture(params=["dense", "hybrid", "pure"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(layout: str = "dense", **more: Any) -> World:
        worlds.append(World(more.pop("root", tmp_path), LAYOUTS[layout], **more))
        return worlds[-1]

    yield make
    for world in worlds:
        world.service.close()
