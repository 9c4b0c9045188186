"""The snapshot service over S3: cold lookup by another replica, two writers, and a store that is away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engram_runtime.snapshots.clock import Clock
from engram_runtime.snapshots.io.s3 import store as s3_store
from engram_runtime.snapshots.io.s3.options import S3Options
from engram_runtime.snapshots.types import Miss
from tests.support.s3_faults import FaultProxy, faulty
from tests.support.s3_process import S3Server, open_store
from tests.support.snapshots import HYBRID, World, tokens
from tests.support.virtual_clock import VirtualClock


@pytest.fixture(params=["moto", "radosgw"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    with faulty(moto.url) as running:
        yield running


def world(root: Path, options: S3Options, clock: Clock | None = None, **more: object) -> World:
    """A replica: its own memory and disk; only the bucket is shared."""
    root.mkdir(parents=True, exist_ok=True)
    store = open_store(options, clock)
    return World(root, layout=HYBRID, disk=False, shared_store=store, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("append_only", [False, True])
def test_another_replica_restores_by_tokens_alone(server: S3Server, tmp_path: Path, append_only: bool) -> None:
    options = server.options(tmp_path / "credentials", server.bucket(), "team/")
    if append_only:
        server.client().put_object(Bucket=options.bucket, Key=f"team/{s3_store.FORMAT}", Body=s3_store.APPEND_ONLY)
    first = world(tmp_path / "a", options)
    turn_one = tokens(700)
    saved = first.save(turn_one)
    longer = [*turn_one, 7, *tokens(300, 1)]
    next_turn = first.save(longer, turn=2, parent=saved.snapshot_id)
    first.service.close()
    second = world(tmp_path / "b", options, device=first.device)
    fetched = second.find([*longer, 7, 1, 2, 3], candidates=(len(longer),), needs_state=True)
    second.check(fetched, next_turn)
    assert fetched.tier == "store"
    rows = second.service.list("default", conversation_id="c").items
    assert {row.snapshot_id for row in rows} >= {next_turn.snapshot_id}
    second.service.delete("default", next_turn.snapshot_id)
    second.service.close()
    third = world(tmp_path / "c", options, device=first.device)
    assert isinstance(third.find([*longer, 7, 1], candidates=(len(longer),), needs_state=True), Miss)
    third.service.close()


@pytest.mark.parametrize("append_only", [False, True])
def test_of_two_writers_of_one_turn_the_loser_is_a_branch(server: S3Server, tmp_path: Path, append_only: bool) -> None:
    options = server.options(tmp_path / "credentials", server.bucket())
    if append_only:
        server.client().put_object(Bucket=options.bucket, Key=s3_store.FORMAT, Body=s3_store.APPEND_ONLY)
    left, right = world(tmp_path / "a", options), world(tmp_path / "b", options)
    base = tokens(300)
    root = left.save(base)
    captures = [
        (replica, replica.capture([*base, 7, *tokens(200, seed)], turn=2, parent=root.snapshot_id))
        for seed, replica in ((1, left), (2, right))
    ]
    for replica, capture in captures:
        replica.service.save(capture)
    for replica, _ in captures:
        assert replica.service.flush(240)
    reader = world(tmp_path / "c", options)
    found = [reader.service.get("default", capture.snapshot_id) for _, capture in captures]
    branches = [info.branch_name for info in found]
    assert branches.count("main") == 1
    assert len(set(branches)) == 2
    winner = found[branches.index("main")]
    assert reader.service.resolve("default", "c").snapshot_id == winner.snapshot_id
    for replica in (left, right, reader):
        replica.service.close()


def test_what_the_probe_found_shows_in_the_status(server: S3Server, tmp_path: Path) -> None:
    replica = world(tmp_path / "a", server.options(tmp_path / "credentials", server.bucket()))
    status = next(tier for tier in replica.service.status() if tier.name == "store")
    assert (status.ready, status.reason) == (True, "Ready")
    assert "conditional writes honoured" in status.message
    replica.service.close()


@pytest.mark.parametrize(
    ("action", "settings", "reason"),
    [
        ("answer", {"status": 500}, "ServerError"),
        ("answer", {"status": 503, "code": "SlowDown"}, "Throttled"),
        ("answer", {"status": 403, "code": "AccessDenied"}, "AccessDenied"),
        ("silence", {}, "Timeout"),
        ("drop", {}, "ConnectionLost"),
    ],
)
def test_a_store_that_is_away_costs_durability_only(
    moto: S3Server, proxy: FaultProxy, tmp_path: Path, action: str, settings: dict[str, object], reason: str
) -> None:
    """The turn goes on from memory; the condition has its reason; what was kept before is whole afterwards."""
    options = replace(
        moto.options(tmp_path / "credentials", moto.bucket()), endpoint_url=proxy.url, deadline_seconds=0.5
    )
    if action == "silence":  # ends with a socket's own time limit; the rest is tried again, and nobody waits for that
        options = replace(options, read_timeout_seconds=1.0)
    replica = world(tmp_path / "a", options, VirtualClock())
    kept_tokens = tokens(300)
    kept = replica.save(kept_tokens)
    proxy.inject(action, **settings)  # type: ignore[arg-type]
    lost = replica.capture([*kept_tokens, 7, *tokens(100, 1)], turn=2, parent=kept.snapshot_id)
    replica.service.save(lost)
    assert replica.service.gathered(240)
    assert not replica.service.flush(0.3)
    fetched = replica.find([*lost.token_ids, 7, 1], candidates=(lost.position,), needs_state=True)
    replica.check(fetched, lost)
    assert fetched.tier == "host"
    assert lost.snapshot_id in replica.released
    seen: set[str] = set()
    until = time.monotonic() + 240
    while reason not in seen and time.monotonic() < until:
        seen |= {tier.reason for tier in replica.service.status() if tier.name == "store"}
        time.sleep(0.1)
    assert reason in seen
    proxy.clear()
    replica.service.close()
    after = world(tmp_path / "b", options, device=replica.device)
    after.check(after.find([*kept_tokens, 7, 1], candidates=(kept.position,), needs_state=True), kept)
    assert all(report.ok for report in after.service.fsck())
    after.service.close()
