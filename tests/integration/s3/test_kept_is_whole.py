"""What befalls a bucket behind everybody's back: the snapshots that are left are whole, and the next save mends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engram_runtime.snapshots.clock import Clock
from engram_runtime.snapshots.io.s3.options import S3Options
from engram_runtime.snapshots.types import Miss, SnapshotConfig, StateLayout
from tests.support import patience
from tests.support.s3_faults import FaultProxy, faulty
from tests.support.s3_process import S3Server, open_store
from tests.support.snapshots import DENSE, HYBRID, KEY, Device, World, tokens
from tests.support.virtual_clock import VirtualClock

LARGE = StateLayout(1, 2, 512, "float32")  # 8 KiB a token: a turn takes several parts
CONFIG = SnapshotConfig(tenant_key=KEY, gc_interval_seconds=0, gc_grace_seconds=3600.0, **patience.SNAPSHOTS)


@pytest.fixture
def options(moto: S3Server, tmp_path: Path) -> S3Options:
    return moto.options(tmp_path / "credentials", moto.bucket(), "team/")


@pytest.fixture
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    with faulty(moto.url) as running:
        yield running


class Replicas:
    """Each with its own memory; only the bucket is shared. All have the same device, as if they computed the same."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: list[World] = []
        self._devices: dict[StateLayout, Device] = {}

    def add(self, layout: StateLayout, options: S3Options, clock: Clock | None = None, **more: Any) -> World:
        root = self._root / str(len(self._open))
        root.mkdir()
        device = next((world.device for world in self._open), None) or Device(layout)
        world = World(
            root,
            layout,
            CONFIG,
            disk=False,
            device=device,
            shared_store=open_store(options, clock),
            **more,
        )
        self._open.append(world)
        return world

    def close(self) -> None:
        for world in self._open:
            world.service.close()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tmp_path / "replicas")
    (tmp_path / "replicas").mkdir()
    yield made
    made.close()


def keys_of(moto: S3Server, options: S3Options, kind: str) -> list[str]:
    """Oldest first."""
    found = moto.client().list_objects_v2(Bucket=options.bucket, Prefix=f"{options.prefix}v1/").get("Contents", [])
    return [item["Key"] for item in sorted(found, key=lambda i: i["LastModified"]) if f"/{kind}/" in item["Key"]]


@pytest.mark.parametrize("layout", [DENSE, HYBRID])
@pytest.mark.parametrize("lost", ["first turn's", "second turn's"])
def test_a_lifecycle_that_takes_one_piece(
    moto: S3Server, options: S3Options, replicas: Replicas, layout: StateLayout, lost: str
) -> None:
    """Nothing incomplete is restored; what does not need the piece is; the next save puts it back."""
    prompt = tokens(400)
    writer = replicas.add(layout, options)
    first = writer.save(prompt[:300])
    files = keys_of(moto, options, "kv")
    second = writer.save(prompt[:380], turn=2, parent=first.snapshot_id)
    if lost == "second turn's":
        files = [key for key in keys_of(moto, options, "kv") if key not in files]
    (piece,) = files
    moto.client().delete_object(Bucket=options.bucket, Key=piece)

    reader = replicas.add(layout, options)
    places = {"candidates": (380, 300), "needs_state": layout is HYBRID}
    found = reader.find(prompt, **places)
    if lost == "first turn's":
        assert isinstance(found, Miss)
        assert found.failed
    else:
        reader.check(found, first)
        assert "not" in found.note or "missing" in found.note or "does" in found.note
    problems = [problem for report in reader.service.fsck() for problem in report.problems]
    assert {problem.kind for problem in problems} >= {"missing"}

    third = reader.save(prompt[:390], turn=3, parent=second.snapshot_id)
    after = replicas.add(layout, options)
    after.check(after.find(prompt, candidates=(390, 380, 300), needs_state=layout is HYBRID), third)


def test_a_half_written_multipart_upload(
    moto: S3Server, options: S3Options, proxy: FaultProxy, replicas: Replicas
) -> None:
    """A writer that dies between two parts, and so cannot take back the first: nothing of the turn is seen."""
    small = replace(options, part_bytes=5 << 20, multipart_from_bytes=5 << 20)
    brief = replace(small, endpoint_url=proxy.url, deadline_seconds=1.0)
    prompt = tokens(1000)
    dying = replicas.add(LARGE, brief, VirtualClock())
    for tier in dying.service._shared.tiers:  # once it is given up, it is tried again when somebody waits for that
        tier.writes._clock = lambda: 0.0
    dying.save(prompt[:20])  # the probe is over
    proxy.inject("drop", path="partNumber=2")
    proxy.inject("drop", method="DELETE")
    lost = dying.capture(prompt[:900], turn=2)
    dying.service.save(lost)
    assert not dying.service.flush(240)
    client = moto.client()
    begun = {upload["Key"] for upload in client.list_multipart_uploads(Bucket=options.bucket)["Uploads"]}
    assert begun
    assert all("/kv/" in key for key in begun)
    assert begun.isdisjoint(keys_of(moto, options, "kv"))

    reader = replicas.add(LARGE, small)
    found = reader.find(prompt, candidates=(900, 20))
    assert found.position == 20
    assert all(report.ok for report in reader.service.fsck())
    reader.service.sweep()
    assert "Uploads" not in client.list_multipart_uploads(Bucket=options.bucket)

    # The writer was not dead after all.
    proxy.clear()
    assert dying.service.flush(240)
    again = replicas.add(LARGE, small)
    again.check(again.find(prompt, candidates=(900,)), lost)


def test_a_bucket_that_is_deleted_and_made_again(moto: S3Server, options: S3Options, replicas: Replicas) -> None:
    """Its content is gone for good; the conversation is not, and the next turn stores all of it once more."""
    prompt = tokens(400)
    writer = replicas.add(HYBRID, options)
    first = writer.save(prompt[:300])
    client = moto.client()
    for item in client.list_objects_v2(Bucket=options.bucket)["Contents"]:
        client.delete_object(Bucket=options.bucket, Key=item["Key"])
    client.delete_bucket(Bucket=options.bucket)

    second = writer.capture(prompt[:350], turn=2, parent=first.snapshot_id)
    writer.service.save(second)
    assert not writer.service.flush(2)
    until = time.monotonic() + 240
    while (seen := next(tier for tier in writer.service.status() if tier.name == "store")).ready:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert seen.reason == "BucketMissing"
    writer.check(writer.find(prompt, candidates=(350, 300), needs_state=True), second)

    client.create_bucket(Bucket=options.bucket)
    assert writer.service.flush(240)
    third = writer.save(prompt[:390], turn=3, parent=second.snapshot_id)
    reader = replicas.add(HYBRID, options)
    reader.check(reader.find(prompt, candidates=(390,), needs_state=True), third)
    assert reader.service.resolve("default", "c").snapshot_id == third.snapshot_id


@pytest.mark.parametrize("minutes", [-14, 14])
def test_a_replica_whose_clock_is_wrong(moto: S3Server, options: S3Options, replicas: Replicas, minutes: int) -> None:
    """It restores what others wrote and they what it wrote; its sweeps do not take what is being written.

    A clock that is off by more than fifteen minutes is refused by the store itself (RequestTimeTooSkewed).
    """
    prompt = tokens(400)
    right = replicas.add(HYBRID, options)
    first = right.save(prompt[:300])
    wrong = replicas.add(HYBRID, options, now=time.time() + 60 * minutes)
    wrong.check(wrong.find(prompt, candidates=(300,), needs_state=True), first)
    second = wrong.save(prompt[:350], turn=2, parent=first.snapshot_id)
    reader = replicas.add(HYBRID, options)
    reader.check(reader.find(prompt, candidates=(350, 300), needs_state=True), second)
    assert reader.service.resolve("default", "c").snapshot_id == second.snapshot_id

    # Somebody is between a turn's content and its manifest.
    (half_way,) = keys_of(moto, options, "kv")[:1]
    beginning = half_way.removesuffix(half_way[-8:]) + "0" * 8
    moto.client().put_object(Bucket=options.bucket, Key=beginning, Body=b"content, not yet referred to")
    for world in (wrong, reader, wrong):
        world.service.sweep()
    assert beginning in keys_of(moto, options, "kv")
    last = replicas.add(HYBRID, options)
    last.check(last.find(prompt, candidates=(350,), needs_state=True), second)


def test_wrong_bits_from_the_bucket_are_not_restored(options: S3Options, proxy: FaultProxy, replicas: Replicas) -> None:
    """On the way or at rest: the digest in the signed manifest sees it, and the turn is computed."""
    prompt = tokens(400)
    writer = replicas.add(DENSE, options)
    saved = writer.save(prompt[:300])
    reader = replicas.add(DENSE, replace(options, endpoint_url=proxy.url))
    proxy.inject("flip", method="GET", path="/kv/")
    found = reader.find(prompt, candidates=(300,))
    assert isinstance(found, Miss)
    assert found.failed
    assert "checksum" in found.reason
    proxy.clear()
    after = replicas.add(DENSE, options)
    after.check(after.find(prompt, candidates=(300,)), saved)
