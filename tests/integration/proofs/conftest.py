"""Checkpoints made once; sites as each proof needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.proofs import FAMILIES, Site
from tests.support.tiny import make_tiny

Checkpoint = Callable[..., Path]
Stored = Callable[[], AbstractContextManager[list[Path]]]


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keys and digests of tiny checkpoints do not belong into the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """checkpoint(family or "dense" or "hybrid", template) -> folder."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, template: str = "chatml") -> Path:
        key = FAMILIES.get(family, family), template
        if key not in made:
            made[key] = make_tiny(key[0], tmp_path_factory.mktemp("models") / "-".join(key), template=template)
        return made[key]

    return get


@pytest.fixture
def make_site(checkpoint: Checkpoint, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """make_site(kind, tier, folder=..., snapshots={...}, **EngineConfig fields): closed when the test ends."""
    with ExitStack() as stack:

        def make(
            kind: str, tier: str, folder: Path | None = None, snapshots: dict[str, Any] | None = None, **config: Any
        ) -> Site:
            site = Site(checkpoint(kind), tier, folder or tmp_path, config=config, snapshots=snapshots or {})
            return stack.enter_context(site)

        yield make


@pytest.fixture
def store(tmp_path: Path) -> dict[str, Any]:
    """Fields of SnapshotConfig for a store of its own."""
    return {"store_uri": f"file://{tmp_path}/store"}


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """`with stored() as files`: all that the store holds; what is written into them it holds afterwards."""

    @contextmanager
    def files() -> Iterator[list[Path]]:
        yield sorted(path for path in (tmp_path / "store").glob("v1/**/*") if path.is_file())

    return files


@pytest.fixture(params=sorted(FAMILIES))
def kind(request: pytest.FixtureRequest) -> str:
    """A dense and a hybrid model."""
    return str(request.param)
