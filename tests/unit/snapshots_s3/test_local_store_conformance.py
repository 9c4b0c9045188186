"""The folder store passes the suite that the S3 stores pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram_runtime.snapshots.io.local_store import LocalStore
from tests.support.store_conformance import StoreConformance


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "store")
