"""One suite over moto and a real Ceph, with and without conditional writes, versions, and odd prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engram_runtime.snapshots.io.s3 import store as s3_store
from engram_runtime.snapshots.io.s3.store import S3Store
from tests.support.s3_process import S3Server, open_store
from tests.support.store_conformance import StoreConformance

ODD_PREFIX = "team a/ü+%41&=~'()*;:@$,!é日本/"


def opened(server: S3Server, folder: Path, prefix: str = "", *, versioned: bool = False) -> Iterator[S3Store]:
    store = open_store(server.options(folder / "credentials", server.bucket(versioned=versioned), prefix))
    yield store
    store.close()


class TestMoto(StoreConformance):
    @pytest.fixture(scope="class")
    def store(self, moto: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Store]:
        yield from opened(moto, tmp_path_factory.mktemp("moto"), ODD_PREFIX)


class TestMotoVersioned(StoreConformance):
    @pytest.fixture(scope="class")
    def store(self, moto: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Store]:
        yield from opened(moto, tmp_path_factory.mktemp("versioned"), versioned=True)


class TestRadosgw(StoreConformance):
    @pytest.fixture(scope="class")
    def store(self, radosgw: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Store]:
        yield from opened(radosgw, tmp_path_factory.mktemp("radosgw"), ODD_PREFIX)

    def test_its_conditions_are_used(self, store: S3Store) -> None:
        assert store.supports_conditional_writes


class TestRadosgwVersioned(StoreConformance):
    """This Ceph ignores If-Match in versioned buckets: the probe sees it, heads become logs."""

    @pytest.fixture(scope="class")
    def store(self, radosgw: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Store]:
        yield from opened(radosgw, tmp_path_factory.mktemp("versioned"), versioned=True)


class TestAppendOnlyHeads(StoreConformance):
    """Ceph as if it ignored every condition."""

    @pytest.fixture(scope="class")
    def store(self, radosgw: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Store]:
        folder = tmp_path_factory.mktemp("append")
        options = radosgw.options(folder / "credentials", radosgw.bucket())
        client = radosgw.client()
        client.put_object(Bucket=options.bucket, Key=s3_store.FORMAT, Body=s3_store.APPEND_ONLY)
        store = open_store(replace(options))
        yield store
        store.close()

    def test_the_mode_is_said(self, store: S3Store) -> None:
        store.probe()
        assert "append-only" in store.report
        assert not store.supports_conditional_writes
