"""The server's calls: list, events, delete, heads, labels, prefetch, save now, retention, fsck."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.service import SnapshotService
from engram_runtime.snapshots.types import Fetched, Miss, RestoreQuery, SnapshotConfig
from tests.support.snapshots import DENSE, Device, RecordingStore, World, tokens

PROMPT = tokens(900, seed=31)


def talk(world: World, conversation: str, turns: int, seed: int = 0, **more: object) -> list[str]:
    prompt = tokens(40, seed=seed)
    found: list[str] = []
    for turn in range(1, turns + 1):
        prompt = [*prompt, *tokens(20, seed=1000 * seed + turn)]
        parent = found[-1] if found else None
        found.append(world.save(prompt, conversation, turn, parent=parent, **more).snapshot_id)
        time.sleep(0.002)
    return found


def test_list_is_newest_first_and_paged(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    made = [*talk(world, "a", 3), *talk(world, "b", 4, seed=1)]
    host_only = world.save(PROMPT[:50], "h", durable=False).snapshot_id
    talk(world, "foreign", 2, seed=2, tenant="other")
    for restarted in (False, True):
        expected = [*made, *([] if restarted else [host_only])][::-1]
        if restarted:
            world.start()
        seen: list[str] = []
        after = None
        while True:
            page = world.service.list("default", limit=3, after=after)
            seen += [info.snapshot_id for info in page.items]
            after = page.next_after
            if after is None:
                break
        assert seen == expected
        only_b = [info.snapshot_id for info in world.service.list("default", conversation_id="b").items]
        assert only_b == made[3:][::-1]
        assert [i.is_head for i in world.service.list("default", conversation_id="b").items] == [True] + [False] * 3
        assert world.service.list("default", conversation_id="b", branch_name="x").items == []
    for bad in ({"limit": 0}, {"limit": 501}, {"after": "../x"}):
        with pytest.raises(ValueError, match=r"limit|after"):
            world.service.list("default", **bad)  # type: ignore[arg-type]


def test_info_and_content(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    messages = b'[{"role":"user","content":"hello"}]'
    capture = world.save(
        PROMPT[:90], "conv", 3, messages=messages, pending=(5, 6), tokenizer_digest="t", tag="v1", pin=True
    )
    for restarted in (False, True):
        if restarted:
            world.start()
        info = world.service.get("default", capture.snapshot_id)
        assert (info.conversation_id, info.branch_name, info.turn_number) == ("conv", "main", 3)
        assert (info.tokens, info.pending, info.boundary, info.tag, info.pinned) == (90, 2, "turn_end", "v1", True)
        assert info.bytes > world.layout.kv_bytes_per_token * 90 + world.layout.state_bytes
        assert info.is_head
        assert ("host" in info.tiers) is not restarted
        content = world.service.content("default", capture.snapshot_id)
        assert content.token_ids == PROMPT[:90]
        assert (content.pending_ids, content.messages, content.tokenizer_digest) == ([5, 6], messages, "t")


def test_resolve_turns(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    made = talk(world, "c", 4)
    for restarted in (False, True):
        if restarted:
            world.start()
        assert world.service.resolve("default", "c").snapshot_id == made[3]
        assert world.service.resolve("default", "c", 2).snapshot_id == made[1]
        with pytest.raises(NotFound):
            world.service.resolve("default", "c", 9)
        with pytest.raises(NotFound):
            world.service.resolve("default", "unknown")


def test_delete_is_gone_at_once_in_every_tier(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    first = world.save(PROMPT[:90])
    second = world.save(PROMPT[:200], turn=2, parent=first.snapshot_id)
    deleted = world.service.delete("default", second.snapshot_id)
    assert deleted.snapshot_id == second.snapshot_id
    for restarted in (False, True):
        if restarted:
            world.start()
        for call in (world.service.get, world.service.content, world.service.delete, world.service.prefetch):
            with pytest.raises(NotFound):
                call("default", second.snapshot_id)
        assert world.service.resolve("default", "c").snapshot_id == first.snapshot_id
        missed = world.find(PROMPT, restore_from=second.snapshot_id, max_position=50)
        assert not isinstance(missed, Fetched) or missed.snapshot_id == first.snapshot_id
        world.check(world.find(PROMPT, candidates=(200, 90)), first)
        assert [info.snapshot_id for info in world.service.list("default").items] == [first.snapshot_id]
    world.service.delete("default", first.snapshot_id)
    assert isinstance(world.find(PROMPT, candidates=(200, 90), conversation_id="c"), Miss)
    world.start(gc_grace_seconds=0)
    world.service.sweep()
    left = [p for folder in (world.disk_path, world.store_path) for p in folder.rglob("v1/**/*") if p.is_file()]
    assert [p for p in left if "/gone/" not in str(p)] == []


def test_deleting_while_it_is_being_saved(tmp_path: Path, make_world: Callable[..., World]) -> None:
    spy = RecordingStore(LocalStore(tmp_path / "store"))
    world = make_world("dense", disk=False, shared_store=spy)
    capture = world.capture(PROMPT[:90])
    deleted = threading.Event()
    spy.fail = lambda call, key: deleted.wait(240) if call == "put" and "/kv/" in key else None
    world.service.save(capture)
    deadline = time.monotonic() + 240
    while world.service._shared.catalogue.get(world.service._shared.space("default"), capture.snapshot_id) is None:
        assert time.monotonic() < deadline
    world.service.delete("default", capture.snapshot_id)
    deleted.set()
    assert world.service.flush(240)
    with pytest.raises(NotFound):
        world.service.get("default", capture.snapshot_id)
    world.start()
    with pytest.raises(NotFound):
        world.service.get("default", capture.snapshot_id)


def test_another_replica_learns_of_a_deletion(make_world: Callable[..., World], tmp_path: Path) -> None:
    device = Device(DENSE)
    a = make_world("dense", root=tmp_path / "a", device=device, shared_store=LocalStore(tmp_path / "store"))
    b = make_world("dense", root=tmp_path / "b", device=device, shared_store=LocalStore(tmp_path / "store"))
    saved = a.save(PROMPT[:90])
    b.check(b.find(PROMPT, candidates=(90,)), saved)
    assert b.service._saver.wait(240)
    a.service.delete("default", saved.snapshot_id)
    with pytest.raises(NotFound):
        b.service.get("default", saved.snapshot_id)
    second = a.save(PROMPT[:300], "d")
    b.check(b.find(PROMPT, candidates=(300,)), second)
    assert b.service._saver.wait(240)
    a.service.delete("default", second.snapshot_id)
    b.service._keeper.poll()
    assert isinstance(b.find(PROMPT, candidates=(300, 90)), Miss)
    assert list((tmp_path / "b" / "disk").rglob("snap/*/*")) == []


def test_events_survive_a_restart(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    made = talk(world, "a", 3)
    page = world.service.events("default", limit=2)
    assert [(e.kind, e.snapshot_id) for e in page.events] == [("saved", made[0]), ("saved", made[1])]
    page = world.service.events("default", after=page.cursor)
    assert [e.snapshot_id for e in page.events] == [made[2]]
    cursor = page.cursor
    assert world.service.events("default", after=cursor).events == []
    world.service.delete("default", made[0])
    page = world.service.events("default", after=cursor)
    assert [(e.kind, e.snapshot_id) for e in page.events] == [("deleted", made[0])]
    world.start()
    more = talk(world, "b", 1, seed=5)
    again = world.service.events("default", after=page.cursor)
    seen = [(e.kind, e.snapshot_id) for e in again.events]
    assert ("saved", more[0]) in seen
    assert ("deleted", made[0]) in seen
    assert world.service.events("default", after=again.cursor).events == []
    assert all(e.info is not None and e.info.conversation_id in "ab" for e in again.events if e.kind == "saved")
    with pytest.raises(ValueError, match="after"):
        world.service.events("default", after="yesterday")


def test_save_now_hardens_and_labels(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    capture = world.save(PROMPT[:90], "c", messages=b"[]", durable=False)
    assert world.service.get("default", capture.snapshot_id).tiers == ("host",)
    info = world.service.save_now("default", "c", tag="before lunch", pin=True, ttl_seconds=3600)
    assert info.tiers == ("host", "disk", "store")
    assert (info.tag, info.pinned) == ("before lunch", True)
    world.start()
    info = world.service.get("default", capture.snapshot_id)
    assert (info.tag, info.pinned) == ("before lunch", True)
    assert info.expires is not None
    assert world.service.content("default", capture.snapshot_id).messages == b"[]"
    world.check(world.find(PROMPT, conversation_id="c"), capture)
    assert not world.service.save_now("default", "c", pin=False).pinned
    with pytest.raises(NotFound):
        world.service.save_now("default", "unknown")
    for bad in ({"tag": ""}, {"ttl_seconds": 0}):
        with pytest.raises(ValueError, match=r"tag|ttl_seconds"):
            world.service.save_now("default", "c", **bad)  # type: ignore[arg-type]


def test_flush_hardens_the_tips(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    tips = [world.save(PROMPT[: 50 + 20 * n], f"c{n}", durable=False) for n in range(3)]
    assert world.service.flush(240)
    world.start()
    for n, tip in enumerate(tips):
        world.check(world.find(PROMPT, conversation_id=f"c{n}"), tip)


def test_a_durable_child_brings_its_host_only_parents_pieces(make_world: Callable[..., World]) -> None:
    world = make_world("hybrid")
    history = world.save(PROMPT[:90], boundary="history", durable=False)
    end = world.save(PROMPT[:150], parent=history.snapshot_id)
    assert world.device.reads[-1] == (90, 60)
    world.start()
    world.check(world.find(PROMPT, candidates=(150,)), end)
    assert all(report.ok for report in world.service.fsck())


def test_prefetch(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    capture = world.save(PROMPT[:300])
    world.start()
    report = world.service.prefetch("default", capture.snapshot_id)
    assert report.tier == "disk"
    assert report.bytes == world.layout.kv_bytes_per_token * 300 + world.layout.state_bytes
    fetched = world.find(PROMPT, restore_from=capture.snapshot_id)
    world.check(fetched, capture)
    assert fetched.tier == "host"
    assert fetched.bytes == report.bytes


def test_expired_snapshots_are_not_there(make_world: Callable[..., World]) -> None:
    world = make_world("dense", now=1_000_000.0)
    capture = world.save(PROMPT[:90], ttl_seconds=60)
    world.check(world.find(PROMPT), capture)
    world.now = 1_000_061.0
    for restarted in (False, True):
        if restarted:
            world.start()
        with pytest.raises(NotFound):
            world.service.get("default", capture.snapshot_id)
        missed = world.find(PROMPT, candidates=(90,))
        assert isinstance(missed, Miss)
        assert "expired" in missed.reason
        assert world.service.list("default").items == []


def test_retention_keeps_the_newest_turns_pins_and_branch_points(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    world.start(keep_last=2, gc_grace_seconds=0)
    made = talk(world, "c", 6)
    world.service.save_now("default", "c", turn_number=2, pin=True)
    prompt = [*world.service.content("default", made[2]).token_ids, *tokens(9, seed=77)]
    branch = world.save(prompt, turn=4, parent=made[2], branch="other").snapshot_id
    report = world.service.sweep()
    left = {info.snapshot_id for info in world.service.list("default").items}
    assert left == {made[1], made[2], made[4], made[5], branch}
    assert report.snapshots_deleted == 4  # two snapshots on two tiers
    for snapshot_id in left:
        tokens_of = world.service.content("default", snapshot_id).token_ids
        found = world.find([*tokens_of, 1], restore_from=snapshot_id)
        assert isinstance(found, Fetched)
        assert found.position == len(tokens_of)
    assert all(r.ok for r in world.service.fsck())
    gone = [e.snapshot_id for e in world.service.events("default").events if e.kind == "deleted"]
    assert sorted(gone) == sorted([made[0], made[3]])


def test_a_shared_system_prompt_outlives_the_turn_that_had_it_first(make_world: Callable[..., World]) -> None:
    world = make_world("dense")
    world.start(gc_grace_seconds=0)
    system = tokens(120, seed=1)
    first = world.save([*system, *tokens(50, seed=2)], "a", user_start=120)
    longer = [*system, *tokens(50, seed=2), *tokens(30, seed=3)]
    second = world.save(longer, "a", 2, parent=first.snapshot_id, user_start=175)
    assert world.service.sweep().snapshots_deleted == 2
    world.start()
    found = world.find([*system, *tokens(60, seed=4)], candidates=(120,))
    assert isinstance(found, Fetched)
    assert (found.snapshot_id, found.position) == (second.snapshot_id, 120)
    world.service.delete("default", second.snapshot_id)
    assert list(world.store_path.rglob("anchor/*/*")) == []


def test_age_is_renewed_by_use(make_world: Callable[..., World]) -> None:
    world = make_world("dense", now=time.time())
    world.start(max_age_seconds=10_000, gc_grace_seconds=0)
    used, unused = world.save(PROMPT[:90], "used"), world.save(PROMPT[200:290], "unused")
    assert world.now is not None
    world.now += 9_000
    time.sleep(0.02)  # the grain of file times
    world.check(world.find(PROMPT[:100], conversation_id="used"), used)
    assert world.service._saver.wait(240)
    for root in (world.disk_path, world.store_path):  # file times are the machine's clock: move them along
        path = next(root.rglob(f"snap/*/{used.snapshot_id}"))
        assert path.stat().st_mtime > next(root.rglob(f"snap/*/{unused.snapshot_id}")).stat().st_mtime
        os.utime(path, (world.now, world.now))
    world.now += 2_000
    world.service.sweep()
    assert [info.snapshot_id for info in world.service.list("default").items] == [used.snapshot_id]


def test_grace_protects_young_and_shared_pieces(make_world: Callable[..., World]) -> None:
    world = make_world("dense", now=time.time(), disk=False)
    world.start(gc_grace_seconds=3600)
    made = talk(world, "c", 2)
    world.service.delete("default", made[0])
    world.service.delete("default", made[1])
    assert world.service.sweep().files_deleted == 0
    assert world.now is not None
    world.now += 3500
    assert world.service.sweep().files_deleted == 0
    again = talk(world, "c", 1)  # the same tokens: the condemned file is used again, and touched
    world.now += 200
    assert world.service.sweep().files_deleted <= 1
    world.start()
    assert isinstance(
        world.find([*world.service.content("default", again[0]).token_ids, 1], conversation_id="c"), Fetched
    )
    world.service.delete("default", again[0])
    world.service.sweep()
    world.now += 4000
    world.service.sweep()
    world.now += 4000
    world.service.sweep()
    assert list(world.store_path.rglob("kv/*/*")) == []


def test_limits_on_conversations_and_bytes(make_world: Callable[..., World]) -> None:
    world = make_world("dense", disk=False)
    world.start(gc_grace_seconds=0, max_conversations=2)
    for n in range(4):
        talk(world, f"c{n}", 1, seed=n)
    world.service.sweep()
    assert {i.conversation_id for i in world.service.list("default").items} == {"c2", "c3"}
    size = sum(p.stat().st_size for p in world.store_path.rglob("v1/**/*") if p.is_file() and "/gone/" not in str(p))
    world.start(max_total_bytes=size // 2, max_conversations=None)
    world.service.sweep()
    assert {i.conversation_id for i in world.service.list("default").items} == {"c3"}
    world.start(suspend_gc=True, max_total_bytes=1)
    assert world.service.sweep().snapshots_deleted == 0


def test_fsck_finds_and_repairs(make_world: Callable[..., World]) -> None:
    world = make_world("dense", disk=False)
    made = talk(world, "c", 3)
    other = talk(world, "d", 1, seed=9)
    assert [r.ok for r in world.service.fsck()] == [True]
    root = world.store_path
    next(root.rglob(f"snap/*/{made[2]}")).write_bytes(b"garbage")
    next(iter(sorted(root.rglob("anchor/*/*")))).write_bytes(b"{}")
    (root / "v1" / "stranger").write_text("?")
    kv = next(p for p in root.rglob("kv/*/*") if p.name in _files(world, other[0]))
    kv.unlink()
    found = {problem.kind for problem in world.service.fsck()[0].problems}
    assert {"damaged", "dangling", "missing", "unknown"} <= found
    world.service.fsck(repair=True)
    world.start()
    assert {p.kind for p in world.service.fsck()[0].problems} <= {"orphan", "unknown"}
    assert world.service.resolve("default", "c").snapshot_id == made[1]
    assert {i.snapshot_id for i in world.service.list("default").items} == set(made[:2])
    with pytest.raises(NotFound):
        world.service.resolve("default", "d")


def _files(world: World, snapshot_id: str) -> frozenset[str]:
    record = world.service._shared.catalogue.get(world.service._shared.space("default"), snapshot_id)
    assert record is not None
    return record.manifest.files()


def test_without_durable_tiers(make_world: Callable[..., World]) -> None:
    world = make_world("dense", disk=False, store=False)
    made = talk(world, "c", 2)
    assert world.service.resolve("default", "c").snapshot_id == made[1]
    assert [i.snapshot_id for i in world.service.list("default").items] == made[::-1]
    assert world.service.save_now("default", "c", tag="t").tag == "t"
    with pytest.raises(SnapshotError):
        world.service.set_head("default", made[0])
    assert list(world.service.fsck()) == []
    assert world.service.sweep().files_deleted == 0
    world.service.delete("default", made[1])
    with pytest.raises(NotFound):
        world.service.get("default", made[1])
    assert world.service.flush(1)


def test_switched_off() -> None:
    service = SnapshotService(SnapshotConfig(enabled=False), state_abi="0" * 64, layout=DENSE, transfer=Device(DENSE))
    assert service.find(RestoreQuery("t", [1, 2, 3])) == Miss("snapshots are off")
    service.close()
