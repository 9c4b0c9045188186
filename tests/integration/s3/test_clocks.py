"""Clocks that are hours wrong: what is being written is not garbage, whatever time a machine believes it is.

A gateway refuses requests that are signed a quarter of an hour off (RequestTimeTooSkewed), but the clock that dates
snapshots and the one that signs need not be the same process's, and moto does not look.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engram_runtime.snapshots.io.s3.options import S3Options
from engram_runtime.snapshots.types import Fetched, SnapshotConfig
from tests.support import patience
from tests.support.s3_process import S3Server, open_store
from tests.support.snapshots import HYBRID, KEY, Device, World, tokens

HOUR = 3600.0


@pytest.fixture(params=["moto", "radosgw"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> S3Options:
    server: S3Server = request.getfixturevalue(request.param)
    return server.options(tmp_path / "credentials", server.bucket(), "team/")


def replica(root: Path, options: S3Options, device: Device, hours: float, grace: float = HOUR) -> World:
    root.mkdir()
    config = SnapshotConfig(tenant_key=KEY, gc_interval_seconds=0, gc_grace_seconds=grace, **patience.SNAPSHOTS)
    now = time.time() + hours * HOUR
    return World(root, HYBRID, config, disk=False, device=device, shared_store=open_store(options), now=now)


def test_the_store_tells_the_time(options: S3Options) -> None:
    store = open_store(options)
    now = store.now()
    assert now is not None
    assert abs(now - time.time()) < 60
    store.close()


@pytest.mark.parametrize("hours", [-30, 30])
def test_a_sweep_spares_a_turn_in_flight(options: S3Options, tmp_path: Path, hours: float) -> None:
    """Content is written before its manifest: a sweeper in between sees a file that nobody refers to."""
    device, prompt = Device(HYBRID), tokens(400)
    writer = replica(tmp_path / "writer", options, device, 0)
    sweeper = replica(tmp_path / "sweeper", options, device, hours)
    kept = writer.save(prompt[:300])
    in_flight = "v1/" + next(i.key for i in open_store(options).list("v1/") if "/kv/" in i.key)[3:-8] + "00000000"
    writer.service._shared.tiers[0].repository.store.put(in_flight, [b"content, not yet referred to"])
    for _ in range(3):
        sweeper.service.sweep()
        assert sweeper.now is not None
        sweeper.now += 2 * HOUR
    assert [info.key for info in open_store(options).list("v1/") if info.key == in_flight]
    assert isinstance(sweeper.find([*prompt[:300], 7, 1], candidates=(300,), needs_state=True), Fetched)
    sweeper.service.close()
    writer.service.close()
    reader = replica(tmp_path / "reader", options, device, 0)
    reader.check(reader.find([*prompt[:300], 7, 1], candidates=(300,), needs_state=True), kept)
    reader.service.close()


def test_the_manifest_of_a_writer_whose_clock_is_behind_is_seen(options: S3Options, tmp_path: Path) -> None:
    """It is committed between a sweep's listing and its deletions, under an id that sorts as if it were old."""
    device, prompt = Device(HYBRID), tokens(600)
    newest = replica(tmp_path / "newest", options, device, 0)
    newest.save(prompt[300:500], "another")
    behind = replica(tmp_path / "behind", options, device, -30)
    sweeper = replica(tmp_path / "sweeper", options, device, 0, grace=0)
    saved = behind.save(prompt[:300])
    store = sweeper.service._shared.tiers[0].repository.store
    whole = {info.key: info for info in store.list("v1/")}
    snapshot = next(key for key in whole if key.endswith(saved.snapshot_id))
    data = store.get(snapshot)
    store.delete(snapshot)
    time.sleep(1.1)  # a store's clock has whole seconds: without any grace the piece is ripe now
    listing = store.inner.list

    def commit_meanwhile(prefix: str, **more: object) -> object:
        found = listing(prefix, **more)
        store.put(snapshot, [data])
        return found

    store.inner.list = commit_meanwhile  # type: ignore[method-assign]
    sweeper.service.sweep()
    left = {info.key for info in listing("v1/")}
    assert {key for key in whole if "/kv/" in key} <= left
    for world in (newest, behind, sweeper):
        world.service.close()
