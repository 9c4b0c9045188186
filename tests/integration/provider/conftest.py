"""Every provider test starts without ENGRAM_* settings, with an empty state directory and a fake engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import litellm
import pytest

from tests.support.fake_openai import FakeEngine


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("ENGRAM_") or name == "KUBERNETES_SERVICE_HOST":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(litellm, "suppress_debug_info", True)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as server:
        yield server
