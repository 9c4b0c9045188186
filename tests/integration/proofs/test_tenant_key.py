"""The tenant key's life: made, mounted, lost, replaced; under a running server and between two.

A process keeps the key that it began with. Under another key nothing is found and nothing is touched, and with the old
one back everything is there again.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.server.tenant_key import local_tenant_key, read_tenant_key
from engram_runtime.snapshots.types import SnapshotConfig
from tests.integration.proofs.places import Message, Place, post, reply, service_of, settle, user
from tests.support import patience
from tests.support.serving import Running

FIELDS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "conversation_id": "kept"}


@dataclass
class KeyedPlace(Place):
    key_file: Path = Path()

    def _load(self) -> AsyncLLMEngine:
        config = EngineConfig(
            str(self.path), device="cpu", progress=False, max_num_seqs=4, kv_cache_tokens=4096, **patience.ENGINE
        )
        snapshots = SnapshotConfig(
            tenant_key=read_tenant_key(self.key_file),
            gc_interval_seconds=0,
            gc_grace_seconds=0,
            **patience.SNAPSHOTS,
            **self.tiers,
        )
        return AsyncLLMEngine.from_config(config, snapshots, registry=self.counted.registry)


def say(running: Running, messages: list[Message], text: str) -> dict[str, Any]:
    messages.append(user(text))
    answer = post(running, messages, **FIELDS)
    messages.append(reply(answer))
    settle(running)
    told: dict[str, Any] = answer["engram"]
    return told


def test_replaced_under_a_running_server_and_put_back(
    checkpoint: Callable[..., Path], kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key_file = tmp_path / "mounted" / "key"
    key_file.parent.mkdir()
    key_file.write_text(secrets.token_hex(32))
    first = key_file.read_text()
    place = KeyedPlace(checkpoint(kind), {"store_uri": f"file://{tmp_path}/store"}, key_file=key_file)
    messages: list[Message] = []
    with place.serve() as running:
        say(running, messages, "Who wrote the book?")
        key_file.write_text(secrets.token_hex(32))  # as a mounted Secret changes
        told = say(running, messages, "And when was that?")
        assert (told["turn_number"], told["restore_failed"]) == (2, False)
        assert told["restored_tokens"] > 0
        assert all(report.ok for report in service_of(running).fsck())
    kept = sorted(path for path in (tmp_path / "store" / "v1").rglob("*") if path.is_file())

    with caplog.at_level(logging.WARNING), place.serve() as running:  # restarted: now the new key counts
        asked = [*messages, user("Is it long?")]
        answer = post(running, asked, **FIELDS)
        told = answer["engram"]
        assert (told["tier"], told["restored_tokens"], told["restore_failed"]) == (None, 0, False)
        settle(running)
        service_of(running).sweep()
        service_of(running).sweep()
        assert {problem.kind for report in service_of(running).fsck() for problem in report.problems} == {"foreign"}
        deadline = time.monotonic() + 240
        while "not signed with this tenant key" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert all(path.exists() for path in kept)

    key_file.write_text(first)
    with place.serve() as running:
        told = say(running, messages, "What did I ask first?")
        assert (told["tier"], told["turn_number"], told["restore_failed"]) == ("store", 3, False)
        assert told["restored_tokens"] > told["prefilled_tokens"]


def test_lost_under_a_running_server(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """It goes on; the next process does not begin without it."""
    key_file = tmp_path / "key"
    key_file.write_text(secrets.token_hex(32))
    place = KeyedPlace(checkpoint("dense"), {"store_uri": f"file://{tmp_path}/store"}, key_file=key_file)
    messages: list[Message] = []
    with place.serve() as running:
        say(running, messages, "Who wrote the book?")
        key_file.unlink()
        assert say(running, messages, "And when was that?")["restored_tokens"] > 0
    with pytest.raises(ValueError, match=r"tenant_key_file .*key cannot be read"):
        read_tenant_key(key_file)


def test_made_once_and_never_replaced(tmp_path: Path) -> None:
    path = local_tenant_key(tmp_path)
    made = read_tenant_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_tenant_key(local_tenant_key(tmp_path)) == made
    path.write_text("torn")
    with pytest.raises(ValueError, match="at least 32 bytes"):
        read_tenant_key(local_tenant_key(tmp_path))
