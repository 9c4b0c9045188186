"""Servers that do less than they say: the probe finds it out, and the store does without."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.io.s3.options import S3Options
from engram_runtime.snapshots.io.store import StoreUnavailable
from tests.support.moto_server import running_moto
from tests.support.s3_faults import FaultProxy, faulty
from tests.support.s3_process import S3Server, open_store
from tests.support.store_conformance import MIB, kv_key, noise, ref_key, space

CONDITIONS = frozenset({"if-none-match", "if-match"})


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    """Headers are taken out of signed requests here: this one does not look at signatures."""
    with running_moto(signed=False) as server:
        yield server


@pytest.fixture(scope="module")
def running(moto: S3Server) -> Iterator[FaultProxy]:
    with faulty(moto.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(running: FaultProxy) -> Iterator[FaultProxy]:
    yield running
    running.clear()
    running.strip = frozenset()


@pytest.fixture
def options(moto: S3Server, proxy: FaultProxy, tmp_path: Path) -> S3Options:
    return replace(moto.options(tmp_path / "credentials", moto.bucket()), endpoint_url=proxy.url)


@pytest.mark.parametrize("stripped", [CONDITIONS, {"if-none-match"}, {"if-match"}])
def test_ignored_conditions_are_found_out_and_said(
    options: S3Options, proxy: FaultProxy, stripped: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    proxy.strip = frozenset(stripped)
    store = open_store(options)
    with caplog.at_level(logging.INFO, logger="engram_runtime"):
        store.probe()
    assert not store.supports_conditional_writes
    assert "NOT honoured" in store.report
    assert "append-only" in store.report
    (record,) = (r for r in caplog.records if "snapshot store" in r.message)
    assert record.levelno == logging.WARNING
    assert store.report in record.message
    store.close()


@pytest.mark.parametrize(
    ("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument"), (304, "NotModified"), (404, "NoSuchKey")]
)
def test_conditions_answered_wrongly_are_not_honoured(
    options: S3Options, proxy: FaultProxy, status: int, code: str
) -> None:
    """Seen in the wild instead of 412. The first two PUTs of the probe have no condition."""
    store = open_store(options)
    proxy.inject("answer", status=status, code=code, method="PUT", path="probe/", skip=2)
    store.probe()
    assert not store.supports_conditional_writes
    store.close()


def test_swaps_without_conditions_have_one_winner(options: S3Options, proxy: FaultProxy) -> None:
    proxy.strip = CONDITIONS
    stores = [open_store(options) for _ in range(3)]
    ref = ref_key(space())
    for store in stores:
        store.probe()
    tag = stores[0].compare_and_swap(ref, b"start", None)
    barrier = threading.Barrier(3)

    def race(number: int) -> str | None:
        barrier.wait()
        try:
            return stores[number].compare_and_swap(ref, f"by {number}".encode(), tag)
        except Conflict:
            return None

    with ThreadPoolExecutor(3) as pool:
        won = {number: result for number, result in enumerate(pool.map(race, range(3))) if result is not None}
    ((number, result),) = won.items()
    for store in stores:
        assert store.get_tagged(ref) == (f"by {number}".encode(), result)
        store.close()


def test_a_repository_keeps_its_way_when_the_server_learns(options: S3Options, proxy: FaultProxy) -> None:
    """A server that is upgraded, or a replica that sees more: heads stay where all of them look."""
    proxy.strip = CONDITIONS
    old = open_store(options)
    ref = ref_key(space())
    tag = old.compare_and_swap(ref, b"head", None)
    proxy.strip = frozenset()
    new, reader = open_store(options), open_store(options)
    new.probe()
    assert "conditional writes honoured" in new.report
    assert not new.supports_conditional_writes
    assert new.get_tagged(ref) == (b"head", tag)
    proxy.inject("answer", status=403, code="AccessDenied", method="PUT")
    assert reader.get(ref) == b"head"  # without the right to write, so without a probe
    old.close(), new.close(), reader.close()


def test_a_repository_refuses_a_server_that_forgot(options: S3Options, proxy: FaultProxy) -> None:
    first = open_store(options)
    first.probe()
    proxy.strip = CONDITIONS
    second = open_store(options)
    with pytest.raises(StoreUnavailable, match="not any more") as caught:
        second.probe()
    assert caught.value.reason == "ConditionalWrites"
    with pytest.raises(StoreUnavailable):
        second.compare_and_swap(ref_key(space()), b"x", None)
    first.close(), second.close()


@pytest.mark.parametrize(
    ("status", "code"), [(400, "MissingContentMD5"), (501, "NotImplemented"), (403, "AccessDenied")]
)
def test_single_deletes_where_many_at_once_fail(options: S3Options, proxy: FaultProxy, status: int, code: str) -> None:
    proxy.inject("answer", status=status, code=code, method="POST", path="?delete")
    proxy.strip = CONDITIONS  # so that heads are several objects
    store = open_store(options)
    store.probe()
    assert "single deletes" in store.report
    ref, tag = ref_key(space()), None
    for turn in range(4):
        tag = store.compare_and_swap(ref, f"turn {turn}".encode(), tag)
    store.delete(ref)
    with pytest.raises(NotFound):
        store.get(ref)
    assert store.plain_list(ref, None, 10) == []
    store.close()


def test_one_request_where_parts_are_not_known(options: S3Options, proxy: FaultProxy) -> None:
    proxy.inject("answer", status=501, code="NotImplemented", method="POST", path="uploads")
    store = open_store(options)
    store.probe()
    assert "no multipart uploads" in store.report
    key, data = kv_key(space()), noise(17 * MIB)
    store.put(key, [data])
    assert store.get(key) == data
    store.close()


def test_what_is_read_must_be_what_was_written(options: S3Options, proxy: FaultProxy) -> None:
    proxy.inject("flip", method="GET", path="probe/")
    store = open_store(options)
    with pytest.raises(StoreUnavailable) as caught:
        store.probe()
    assert caught.value.reason == "ReadBack"
    store.close()


def test_old_versions_that_cannot_be_deleted_are_reported(
    moto: S3Server, options: S3Options, proxy: FaultProxy
) -> None:
    bucket = moto.bucket(versioned=True)
    proxy.inject("answer", status=403, code="AccessDenied", method="DELETE", path="versionId=")
    store = open_store(replace(options, bucket=bucket))
    store.probe()
    assert "deleted data stays as old versions" in store.report
    key = kv_key(space())
    store.put(key, [b"x"])
    store.delete(key)
    with pytest.raises(NotFound):
        store.get(key)
    store.close()


def test_a_probe_that_fails_is_made_again_before_the_next_write(options: S3Options, proxy: FaultProxy) -> None:
    store = open_store(replace(options, deadline_seconds=0.5))
    proxy.inject("answer", status=500)
    with pytest.raises(StoreUnavailable):
        store.probe()
    assert store.report == ""
    proxy.clear()
    patient = open_store(options)
    patient.put(kv_key(space()), [b"x"])
    assert "conditional writes honoured" in patient.report
    store.close(), patient.close()
