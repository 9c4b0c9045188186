"""Damaged, forged and foreign bytes: refused with a reason when checks are on, really injected when they are off."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.io import files, format
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.policy import manifest as manifests
from engram_runtime.snapshots.policy.identity import Keyring, Signer
from engram_runtime.snapshots.types import Fetched, Miss
from tests.support.snapshots import KEY, RecordingStore, World, tokens

TIERS = ["disk", "store"]


def only(make_world: Callable[..., World], layout: str, tier: str, **more: Any) -> World:
    return make_world(layout, disk=tier == "disk", store=tier == "store", **more)


def stored(world: World, kind: str) -> list[Path]:
    root = world.disk_path if world.disk else world.store_path
    return sorted(path for path in root.glob(f"v1/*/*/{kind}/**/*") if path.is_file())


def rewrite(path: Path, name_prefix: str, change: Callable[[bytes], bytes]) -> int:
    """Change the bytes of tensors whose name starts so; how many were changed."""
    data = bytearray(path.read_bytes())
    header = format.parse(bytes(data), len(data))
    count = 0
    for entry in header.tensors.values():
        if entry.name.startswith(name_prefix):
            data[entry.offset : entry.offset + entry.nbytes] = change(
                bytes(data[entry.offset : entry.offset + entry.nbytes])
            )
            count += 1
    path.write_bytes(data)
    return count


def zeroed(data: bytes) -> bytes:
    return bytes(len(data))


def noise(data: bytes) -> bytes:
    return random.Random(1).randbytes(len(data))


@pytest.mark.parametrize("change", [zeroed, noise])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("layout", "kind", "tensor"),
    [("dense", "kv", "kv."), ("hybrid", "kv", "kv."), ("hybrid", "snap", "ssm"), ("pure", "snap", "conv")],
)
def test_changed_tensors(
    make_world: Callable[..., World], layout: str, kind: str, tensor: str, tier: str, change: Callable[[bytes], bytes]
) -> None:
    world = only(make_world, layout, tier)
    prompt = tokens(100)
    saved = world.save(prompt[:90])
    assert sum(rewrite(path, tensor, change) for path in stored(world, kind)) > 0
    world.start()
    missed = world.find(prompt, candidates=(90,))
    assert isinstance(missed, Miss)
    assert missed.failed
    assert "checksum" in missed.reason
    world.start(verify=False)
    fetched = world.find(prompt, candidates=(90,))
    assert isinstance(fetched, Fetched)
    read = fetched.kv[0][1] if kind == "kv" else fetched.state[tensor]  # type: ignore[index]
    expected = (
        world.device.read_kv(saved.block_ids, 0, 90)
        if kind == "kv"
        else world.device.read_state(saved.state_slot)[tensor]  # type: ignore[arg-type]
    )
    assert not torch.equal(read.view(torch.uint8), expected.view(torch.uint8))
    if change is zeroed:
        assert not read.view(torch.uint8).any()


def test_host_tier_is_checked_too(make_world: Callable[..., World]) -> None:
    world = make_world("dense", disk=False, store=False)
    prompt = tokens(100)
    world.save(prompt[:90])
    for pool in world.service._shared.host._pools.values():
        for value, _ in pool.items.values():
            value["kv"].zero_()
    missed = world.find(prompt)
    assert isinstance(missed, Miss)
    assert missed.failed
    assert "checksum" in missed.reason


def test_a_damaged_disk_copy_falls_back_to_the_store(make_world: Callable[..., World], layout: str) -> None:
    world = make_world(layout)
    prompt = tokens(100)
    saved = world.save(prompt[:90])
    for path in stored(world, "kv" if layout == "dense" else "snap"):
        rewrite(path, "kv." if layout == "dense" else "ssm", noise)
    world.start()
    fetched = world.find(prompt, candidates=(90,))
    world.check(fetched, saved)
    assert fetched.tier == "store"


def test_a_damaged_piece_is_written_again_by_the_next_save(make_world: Callable[..., World]) -> None:
    world = only(make_world, "dense", "store")
    prompt = tokens(200)
    first = world.save(prompt[:90])
    rewrite(stored(world, "kv")[0], "kv.", noise)
    world.start()
    assert isinstance(world.find(prompt, candidates=(90,)), Miss)
    second = world.save(prompt[:190], turn=2, parent=first.snapshot_id)
    world.start()
    world.check(world.find(prompt, candidates=(190, 90)), second)


def forge(world: World, change: Callable[[manifests.Manifest], manifests.Manifest], signer: Signer) -> None:
    """Rewrite the snapshot file with right checksums, signed by `signer`."""
    for path in stored(world, "snap"):
        data = path.read_bytes()
        header = format.parse(data, len(data))
        own = world.service._shared.tiers[0].repository.signer(world.service._shared.space("default"))
        text, mac = header.metadata[files.MANIFEST_KEY], header.metadata[files.HMAC_KEY]
        manifest = change(manifests.decode(text, mac, own))
        parts = tuple(
            format.TensorPart(e.name, e.dtype, e.shape, memoryview(data)[e.offset : e.offset + e.nbytes])
            for e in header.tensors.values()
            if not e.name.startswith("pad.")
        )
        image = files.build_snapshot_file(manifest, files.SnapshotParts(parts, manifest.tensors), signer)
        path.write_bytes(b"".join(image.parts))


@pytest.mark.parametrize("tier", TIERS)
def test_forged_manifest_is_refused(make_world: Callable[..., World], layout: str, tier: str) -> None:
    world = only(make_world, layout, tier)
    prompt = tokens(100)
    saved = world.save(prompt[:90])
    attacker = Keyring(b"x" * 32).signer(world.service._shared.space("default").namespace)
    forge(world, lambda manifest: manifest, attacker)
    world.start()
    for query in ({"candidates": (90,)}, {"conversation_id": "c"}, {"restore_from": saved.snapshot_id}):
        missed = world.find(prompt, **query)
        assert isinstance(missed, Miss)
        assert missed.failed
        assert "signature" in missed.reason
    with pytest.raises(SnapshotError, match="signature"):
        world.service.get("default", saved.snapshot_id)
    assert any(p.kind == "forged" for report in world.service.fsck() for p in report.problems)


def test_a_manifest_moved_to_another_id_is_refused(make_world: Callable[..., World]) -> None:
    world = only(make_world, "dense", "store")
    prompt, other = tokens(100), tokens(100, seed=2)
    first, second = world.save(prompt[:90], "a"), world.save(other[:90], "b")
    paths = {path.name: path for path in stored(world, "snap")}
    paths[first.snapshot_id].write_bytes(paths[second.snapshot_id].read_bytes())
    world.start()
    missed = world.find(prompt, restore_from=first.snapshot_id)
    assert isinstance(missed, Miss)
    assert "another snapshot" in missed.reason


def test_forged_head_and_anchor_are_refused(make_world: Callable[..., World]) -> None:
    world = only(make_world, "dense", "store")
    prompt = tokens(100)
    world.save(prompt[:90])
    for kind in ("ref", "anchor"):
        for path in stored(world, kind):
            path.write_bytes(path.read_bytes().replace(b'\\"', b"'", 2))
    world.start()
    missed = world.find(prompt, candidates=(90,), conversation_id="c")
    assert isinstance(missed, Miss)
    assert missed.failed


def looked_around(world: World) -> None:
    """A service that starts lists each tier once, and reads a manifest to see whose key signed it: no request does."""
    deadline = time.monotonic() + 240
    while not next(tier.objects for tier in world.service.status() if tier.name == "store"):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_foreign_tenant_reads_nothing(make_world: Callable[..., World], layout: str, tmp_path: Path) -> None:
    spy = RecordingStore(LocalStore(tmp_path / "store"))
    world = make_world(layout, disk=False, shared_store=spy)
    prompt = tokens(300)
    saved = world.save(prompt[:290], "secret", user_start=40, tenant="alice")
    namespace = world.service._shared.space("alice").namespace
    for restart in (False, True):
        if restart:
            world.start()
            looked_around(world)
        spy.calls.clear()
        spy.bytes_read = 0
        for query in (
            {"candidates": (290, 40)},
            {"conversation_id": "secret", "candidates": (290,)},
            {"restore_from": saved.snapshot_id, "candidates": (290,)},
        ):
            assert isinstance(world.find(prompt, "mallory", **query), Miss)
        for call in (world.service.get, world.service.content, world.service.delete, world.service.set_head):
            with pytest.raises(NotFound):
                call("mallory", saved.snapshot_id)
        with pytest.raises(NotFound):
            world.service.resolve("mallory", "secret")
        assert world.service.list("mallory").items == []
        assert world.service.events("mallory").events == []
        assert spy.bytes_read == 0
        assert not [key for _, key in spy.calls if namespace in key]
        assert spy.calls
    world.check(world.find(prompt, "alice", candidates=(290,)), saved)


def test_another_secret_or_model_finds_nothing(make_world: Callable[..., World]) -> None:
    world = only(make_world, "dense", "store")
    prompt = tokens(100)
    saved = world.save(prompt[:90])
    world.start(tenant_key=b"y" * 32)
    assert isinstance(world.find(prompt, candidates=(90,), restore_from=saved.snapshot_id), Miss)
    world.start(tenant_key=KEY)
    assert isinstance(world.find(prompt, candidates=(90,)), Fetched)


HOSTILE = [
    "../../etc/passwd",
    "..",
    "/",
    "a/b",
    "x" * 32,
    "A" * 32,
    "0" * 31,
    "0" * 33,
    "",
    "\x00" * 32,
    "é" * 32,
    "0" * 32 + "\n",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_snapshot_ids(make_world: Callable[..., World], name: str) -> None:
    world = make_world("dense")
    for call in (world.service.get, world.service.content, world.service.delete, world.service.set_head):
        with pytest.raises(ValueError, match="snapshot_id"):
            call("default", name)
    with pytest.raises(ValueError, match="snapshot_id"):
        world.find(tokens(5), restore_from=name)


@pytest.mark.parametrize("name", ["../../../etc/x", "a/../b", "..", "con:1", "😀 chat", "a" * 256])
def test_odd_conversation_ids_are_only_names(make_world: Callable[..., World], tmp_path: Path, name: str) -> None:
    world = make_world("dense", root=tmp_path / "inside")
    prompt = tokens(60)
    saved = world.save(prompt[:50], name)
    world.start()
    world.check(world.find(prompt, conversation_id=name), saved)
    assert world.service.resolve("default", name).snapshot_id == saved.snapshot_id
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    for path in (tmp_path / "inside").rglob("*"):
        relative = path.relative_to(tmp_path / "inside").parts[1:]
        assert all(part.isascii() and part.isalnum() for part in relative)


@pytest.mark.parametrize("name", ["", " a", "a\n", "a\x00", "a" * 257])
def test_bad_conversation_ids(make_world: Callable[..., World], name: str) -> None:
    world = make_world("dense")
    capture = world.capture(tokens(20), name)
    with pytest.raises(ValueError, match="conversation_id"):
        world.service.save(capture)
    assert world.released == [capture.snapshot_id]
    with pytest.raises(ValueError, match="conversation_id"):
        world.service.resolve("default", name)


def test_random_flips_never_inject(make_world: Callable[..., World], layout: str) -> None:
    """A flipped bit anywhere in any file: either what was saved comes back, or a Miss with a reason."""
    world = only(make_world, layout, "store")
    prompt = tokens(100)
    saved = world.save(prompt[:90], messages=b'[{"role":"user"}]')
    originals = {path: path.read_bytes() for path in world.store_path.rglob("v1/**/*") if path.is_file()}
    chooser = random.Random(7)
    misses = 0
    for number in range(120):
        path = chooser.choice(sorted(originals))
        data = bytearray(originals[path])
        if number % 4 == 3:
            data = data[: chooser.randrange(len(data))]
        else:
            data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        path.write_bytes(data)
        world.start()
        found = world.find(prompt, candidates=(90,))
        if isinstance(found, Miss):
            misses += 1
            assert found.reason
        else:
            world.check(found, saved)
        world.service.fsck()
        path.write_bytes(originals[path])
    assert misses > 10
    world.start()
    world.check(world.find(prompt, candidates=(90,)), saved)
    assert all(report.ok for report in world.service.fsck())
