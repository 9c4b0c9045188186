"""What many tests stand on, started once per process and only when a test asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import radosgw as ceph
from tests.support.engine_processes import EngineProcesses
from tests.support.groups import GROUPS, group_of
from tests.support.moto_server import running_moto
from tests.support.radosgw import running_radosgw
from tests.support.s3_process import S3Server

ROOT = Path(__file__).parent
FIRST = (
    "proofs_s3/test_trouble.py",
    "provider/test_floor.py",
    "proofs_s3/test_proofs.py",
    "s3/test_faults.py",
    "operator/test_trouble.py",
    "server/test_engine.py",
    "s3/test_service.py",
    "s3/test_liars.py",
    "proofs/test_against_transformers.py",
    "s3/test_access.py",
    "server/test_leaks.py",
    "proofs/test_tamper.py",
    "local/test_real_engine.py",
    "snapshots/test_trouble.py",
    "snapshots/test_crash.py",
    "s3/test_kept_is_whole.py",
)
"""The longest files begin first: the last one to begin is waited for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(ROOT).as_posix() if item.path.is_relative_to(ROOT) else ""
        if group_of(item.nodeid) in GROUPS:
            return -1
        return FIRST.index(path) if path in FIRST else len(FIRST)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def radosgw() -> Iterator[S3Server]:
    reason = ceph.missing()
    if reason is not None:
        pytest.skip(reason)
    with running_radosgw() as server:
        yield server


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcesses]:
    """`engram` command lines in processes of their own."""
    tiny = importlib.import_module("tests.support.tiny")  # takes seconds, and most folders do without it
    with EngineProcesses(tiny.make_tiny("llama", tmp_path_factory.mktemp("processes") / "model")) as started:
        yield started
