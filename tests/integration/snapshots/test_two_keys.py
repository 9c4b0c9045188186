"""One store, two tenant keys (two clusters, or somebody started with the wrong key): neither harms the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engram_runtime.snapshots.io.local_store import LocalStore
from tests.support.snapshots import KEY, World

OTHER = b"another key, as long as it must!"
PROMPT = list(range(400, 700))


def files(root: Path) -> dict[str, bytes]:
    """All that matters: not when a sweep first saw a file unused."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("v1/**/*")
        if path.is_file() and "/sweep/" not in str(path)
    }


def test_neither_sweep_nor_repair_touches_what_another_key_signed(
    make_world: Callable[..., World], layout: str, tmp_path: Path
) -> None:
    shared = LocalStore(tmp_path / "store")
    world = make_world(layout, root=tmp_path / "a", disk=False, shared_store=shared, now=time.time())
    saved = world.save(PROMPT[:290])
    label = world.service.save_now("default", "c", tag="exam", pin=True)
    assert label.pinned
    before = files(shared.root)

    world.config = replace(world.config, tenant_key=OTHER)
    world.start(gc_grace_seconds=60, max_conversations=1, max_total_bytes=1)
    world.save(PROMPT[:100], "d")
    for _ in range(4):
        assert world.now is not None
        world.now += 100
        world.service.sweep()
    (report,) = world.service.fsck(repair=True)
    assert [problem.kind for problem in report.problems if problem.kind != "orphan"] == ["foreign"]
    assert report.ok
    assert {key: data for key, data in files(shared.root).items() if key in before} == before

    world.config = replace(world.config, tenant_key=KEY, max_total_bytes=None)
    world.start()
    world.check(world.find(PROMPT, candidates=(290,)), saved)
    assert not [p for p in world.service.fsck()[0].problems if p.kind in ("missing", "damaged", "forged")]


def test_a_forgery_among_the_genuine_is_still_removed(make_world: Callable[..., World], tmp_path: Path) -> None:
    world = make_world("dense", disk=False, root=tmp_path)
    world.save(PROMPT[:100], "genuine")
    bad = world.save(PROMPT[100:290], "forged")
    path = next(world.store_path.rglob(f"snap/*/{bad.snapshot_id}"))
    data = path.read_bytes()
    at = data.index(b"engram.hmac") + len(b'engram.hmac":"')
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    kinds = {problem.kind for problem in world.service.fsck(repair=True)[0].problems}
    assert "forged" in kinds
    assert not path.exists()
