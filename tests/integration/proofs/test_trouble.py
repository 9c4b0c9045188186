"""A tier that cannot be written costs memory, never an answer: the chat goes on, the status says why, and it heals."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.loading import load
from engram_runtime.executor.transfer import state_layout
from engram_runtime.snapshots.io.filesystem import FileSystem
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.policy.identity import state_abi
from engram_runtime.snapshots.service import SnapshotService
from engram_runtime.snapshots.types import SnapshotConfig
from tests.integration.proofs.places import Message, Place, post, reply, service_of, settle, user
from tests.support import loopback, patience
from tests.support.proofs import KEY
from tests.support.serving import Running, serving

FIELDS = {"max_tokens": 12, "ignore_eos": True, "conversation_id": "in trouble"}


class Chat:
    """A conversation whose answers are known from an engine that was never in trouble."""

    def __init__(self, healthy: Running) -> None:
        self.messages: list[Message] = []
        self._healthy = healthy

    def say(self, running: Running, text: str, *, stored: bool = True) -> dict[str, Any]:
        """The report of a turn; its answer is the one of a healthy engine. `stored`: and it is in every tier."""
        self.messages.append(user(text))
        expected = reply(post(self._healthy, self.messages, **FIELDS))
        answer = post(running, self.messages, **FIELDS)
        assert reply(answer) == expected
        self.messages.append(expected)
        settle(running, stored=stored)
        told: dict[str, Any] = answer["engram"]
        return told


@pytest.fixture
def chat(checkpoint: Callable[..., Path], kind: str) -> Iterator[Chat]:
    with Place(checkpoint(kind), {}).serve() as healthy:
        yield Chat(healthy)


def tier(running: Running, name: str) -> dict[str, Any]:
    """As an administrator sees it."""
    status = loopback.get(f"{running.admin_url}/status").json()
    assert status["phase"] == "ready"
    found: dict[str, Any] = next(tier for tier in status["tiers"] if tier["name"] == name)
    return found


def in_trouble(running: Running, name: str, reason: str | None = None) -> dict[str, Any]:
    """How the tier looks, once it has noticed: with this reason, which is that of the newest try."""
    deadline = time.monotonic() + 240
    while (found := tier(running, name))["ready"] or reason not in (None, found["reason"]):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def stop_pauses(running: Running) -> None:
    """A tier in trouble is not tried again before somebody waits for it: a full disk may have room for a try."""
    for each in service_of(running)._shared.tiers:  # type: ignore[attr-defined]
        each.writes._clock = lambda: 0.0


def heal(running: Running, name: str, chat: Chat) -> None:
    """After a pause the tier is tried again, at the latest by the next turn; from then on turns are stored again."""
    deadline = time.monotonic() + 240
    while not tier(running, name)["ready"]:
        assert time.monotonic() < deadline
        time.sleep(0.3)
        chat.say(running, "Are you there?", stored=False)
    chat.say(running, "Good.", stored=False)
    while not service_of(running).flush(240):  # a hasty store may fail a few times more on a busy machine
        assert time.monotonic() < deadline


@pytest.mark.parametrize("name", ["disk", "store"])
def test_the_folder_is_gone(checkpoint: Callable[..., Path], chat: Chat, kind: str, name: str, tmp_path: Path) -> None:
    """Moved away under the running server, a file in its place: no user, not even root, can write there."""
    folder, aside = tmp_path / "tier", tmp_path / "aside"
    place = Place(checkpoint(kind), {"disk_path": folder} if name == "disk" else {"store_uri": f"file://{folder}"})
    with place.serve() as running:
        chat.say(running, "Who wrote the book?")
        assert tier(running, name)["ready"]
        folder.rename(aside)
        folder.write_text("not a folder")
        for text in ("What is the capital of France?", "Is it far away?", "Thank you very much."):
            told = chat.say(running, text, stored=False)
            # Device and host still know the conversation.
            assert told["tier"] in ("gpu", "host")
            assert told["restored_tokens"] > 0
        seen = in_trouble(running, name)
        assert seen["reason"] not in ("", "Ready")
        assert seen["message"]
        folder.unlink()
        aside.rename(folder)
        heal(running, name, chat)
    with place.serve() as running:
        told = chat.say(running, "What did I ask first?")
        assert (told["tier"], told["restore_failed"]) == (name, False)


class FullDisk(FileSystem):
    """Has no room while `full`."""

    full = False

    def _check(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def make_directory(self, path: Path) -> None:
        self._check()
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._check()
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._check()
        return super().write(descriptor, data)


def engine_with(path: Path, disk: LocalStore) -> AsyncLLMEngine:
    """As `load_engine` makes it, with a disk of our own."""
    config = EngineConfig(
        str(path), device="cpu", progress=False, max_num_seqs=4, kv_cache_tokens=4096, **patience.ENGINE
    )
    loaded = load(config)
    transfer = loaded.executor.transfer
    service = SnapshotService(
        SnapshotConfig(tenant_key=KEY, gc_interval_seconds=0, **patience.SNAPSHOTS),
        state_abi=state_abi(loaded.spec.abi_fields()),
        layout=state_layout(loaded.spec),
        transfer=transfer,
        disk=disk,
    )
    core = LLMEngine(
        config,
        loaded.executor,
        vocab_size=loaded.spec.vocab_size,
        tokenizer=loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        snapshots=service,
        transfer=transfer,
    )
    return AsyncLLMEngine(core)


def test_the_disk_is_full(checkpoint: Callable[..., Path], chat: Chat, kind: str, tmp_path: Path) -> None:
    path = checkpoint(kind)
    disk = FullDisk()
    with serving(lambda: engine_with(path, LocalStore(tmp_path / "disk", disk))) as running:
        chat.say(running, "Who wrote the book?")
        assert tier(running, "disk")["ready"]
        disk.full = True
        for text in ("What is the capital of France?", "Is it far away?"):
            assert chat.say(running, text, stored=False)["tier"] in ("gpu", "host")
        seen = in_trouble(running, "disk", "DiskFull")
        assert "No space left" in seen["message"]
        disk.full = False
        heal(running, "disk", chat)
        assert all(report.ok for report in service_of(running).fsck())
    with serving(lambda: engine_with(path, LocalStore(tmp_path / "disk"))) as running:
        assert chat.say(running, "What did I ask first?")["tier"] == "disk"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tiny"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("kind", ["hybrid"])
def test_a_really_full_disk(checkpoint: Callable[..., Path], chat: Chat, kind: str, tiny_disk: Path) -> None:
    """A tmpfs of 192 KiB: chats long after the last byte is taken, and nothing on it is torn."""
    place = Place(checkpoint(kind), {"store_uri": f"file://{tiny_disk}/store"})
    with place.serve(drain_timeout=1.0) as running:
        stop_pauses(running)
        deadline = time.monotonic() + 240
        while tier(running, "store")["ready"]:
            assert time.monotonic() < deadline
            chat.say(running, "Was it cheaper to compute or to copy? Measure, then decide.", stored=False)
        for text in ("Is it far away?", "Thank you."):
            assert chat.say(running, text, stored=False)["tier"] in ("gpu", "host")
        assert tier(running, "store")["reason"] == "DiskFull"
        assert all(report.ok for report in service_of(running).fsck())
    with place.serve(drain_timeout=1.0) as running:
        told = chat.say(running, "What did I ask first?", stored=False)
        assert told["tier"] == "store"
        assert told["restored_tokens"] > 0
