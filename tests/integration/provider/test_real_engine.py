"""The provider and the snapshot client against the real server with a tiny random model, across a SIGKILL."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import litellm
import pytest

from engram_litellm import SyncSnapshotClient
from tests.integration.provider.styles import STYLES, ask
from tests.support import loopback
from tests.support.engine_processes import EngineProcesses, EngramProcess
from tests.support.ports import free_base
from tests.support.tiny import make_tiny

OPTIONS: dict[str, Any] = {"model": "engram/tiny", "max_tokens": 6, "temperature": 0}


class Engine:
    """One server process that can be killed and started again on the same port and store."""

    def __init__(self, folder: Path, processes: EngineProcesses) -> None:
        self.folder = folder
        self._processes = processes
        make_tiny("llama", folder / "model")
        self.port = free_base([0, 1])
        self.admin = self.port + 1
        self.process: EngramProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        arguments = ["serve", "--model", self.folder / "model", "--served-model-name", "tiny", "--device", "cpu"]
        arguments += ["--port", self.port, "--admin-port", self.admin]
        arguments += ["--snapshot-store", f"file://{self.folder}/store", "--snapshot-disk-path", self.folder / "disk"]
        environment = {"XDG_STATE_HOME": str(self.folder / "state")}
        self.process = self._processes.start(arguments, self.folder / "log", environment=environment)

    def wait_ready(self) -> None:
        end = time.monotonic() + 240
        while time.monotonic() < end:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log").read_text()[-3000:]
            try:
                if loopback.get(f"{self.url}/health/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise AssertionError((self.folder / "log").read_text()[-3000:])

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, processes: EngineProcesses) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine"), processes)
    engine.start()
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.kill()


@pytest.fixture(autouse=True)
def published(server: Engine) -> None:
    """The list that `engram up` writes."""
    path = Path(os.environ["XDG_STATE_HOME"]) / "engram" / "endpoints.json"
    path.parent.mkdir(parents=True)
    endpoint = {"name": "tiny-0", "url": server.url, "admin_url": f"http://127.0.0.1:{server.admin}"}
    path.write_text(
        json.dumps({"version": 1, "models": {"tiny": {"namespace": "default", "endpoints": [endpoint], "pid": 1}}})
    )


def rows_of(server: Engine, conversation_id: str) -> list[dict[str, Any]]:
    answer = loopback.get(f"{server.url}/v1/snapshots", params={"conversation_id": conversation_id})
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


def wait_until_warm(server: Engine, conversation_id: str, turn: int) -> None:
    """Until the turn has left behind the last that it does: what its successor goes on from."""
    end = time.monotonic() + 240
    while (turn, "next_history") not in {
        (row["turn_number"], row["boundary"]) for row in rows_of(server, conversation_id)
    }:
        assert time.monotonic() < end, "turns are saved in the background, but soon"
        time.sleep(0.02)


def wait_until_stored(server: Engine, conversation_id: str) -> None:
    end = time.monotonic() + 240
    while True:
        rows = rows_of(server, conversation_id)
        if any("disk" in row["tiers"] for row in rows):
            return
        assert time.monotonic() < end, "turns are saved in the background, but soon"
        time.sleep(0.02)


@pytest.mark.parametrize("style", STYLES)
def test_only_new_tokens_are_computed(style: str) -> None:
    messages: list[Any] = [{"role": "user", "content": f"a story, told {style}"}]
    conversations = set()
    for turn in range(1, 4):
        out = ask(style, messages, **OPTIONS)
        conversations.add(out.engram["conversation_id"])
        assert out.engram["turn_number"] == turn
        assert out.engram["restore_failed"] is False
        assert out.usage.prompt_tokens_details.cached_tokens == out.engram["tokens_saved"]
        if turn > 1:
            assert 0 < out.usage.prompt_tokens - out.engram["tokens_saved"] < 30
        messages += [out.message, {"role": "user", "content": "go on"}]
    assert len(conversations) == 1


@pytest.mark.parametrize("style", STYLES)
def test_recall_with_the_new_message_only(style: str) -> None:
    name = f"recall-{style}"
    first = ask(style, [{"role": "user", "content": "the word is bee"}], conversation_id=name, **OPTIONS)
    full_history = [
        {"role": "user", "content": "the word is bee"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "which word?"},
    ]
    full = ask(style, full_history, extra_body={"stateful_mode": "stateless"}, **OPTIONS)
    short = ask(style, full_history[-1:], extra_body={"restore_from": f"{name}:1"}, **OPTIONS)
    assert short.usage.prompt_tokens == full.usage.prompt_tokens
    assert short.engram["restored_tokens"] > 0
    assert short.text == full.text


@pytest.mark.parametrize("style", STYLES)
def test_stateless_leaves_nothing_behind(style: str, server: Engine) -> None:
    messages = [{"role": "user", "content": f"forget this, {style}"}]
    out = ask(style, messages, extra_body={"stateful_mode": "stateless"}, **OPTIONS)
    assert out.engram["snapshot_id"] is None
    assert out.engram["auto_save"] is False
    assert out.engram["tier"] in (None, "gpu"), "a prefix in the engine's own memory is shared, a snapshot is not read"
    with SyncSnapshotClient(server.url) as client:
        assert client.list_snapshots(out.engram["conversation_id"] or "none") == []


def test_errors_are_litellms() -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=[{"role": "user", "content": "x"}], **{**OPTIONS, "temperature": -1})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "x " * 6000}], **OPTIONS)
    with pytest.raises(litellm.BadRequestError, match="nonsense"):
        litellm.completion(messages=[{"role": "user", "content": "x"}], extra_body={"nonsense": 1}, **OPTIONS)


def test_the_snapshot_calls(server: Engine) -> None:
    messages: list[Any] = [{"role": "user", "content": "to be kept"}]
    for turn in (1, 2):
        out = ask("sync", messages, conversation_id="kept", **OPTIONS)
        messages += [out.message, {"role": "user", "content": "more"}]
        wait_until_warm(server, "kept", turn)
    with SyncSnapshotClient(server.url) as client:
        assert {snapshot.turn_number for snapshot in client.list_snapshots("kept")} == {1, 2}
        saved = client.save_snapshot("kept", turn_number=2, tag="mine", pin=True)
        assert saved.turn_number == 2
        info = client.get_snapshot_info("kept", turn_number=1)
        assert (info.conversation_id, info.turn_number, info.model) == ("kept", 1, "tiny")
        assert info.size_bytes
        restored = client.restore_snapshot("kept", turn_number=1)
        assert restored.turn_number == 1
        assert restored.restore_time_ms > 0
        assert client.delete_snapshot("kept").count >= 2
        assert client.list_snapshots("kept") == []


def test_a_conversation_survives_a_kill_within_one_call(server: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is killed between turns and comes back while the next call already waits for it."""
    monkeypatch.setenv("ENGRAM_WAIT_SECONDS", "240")  # a busy machine needs more than the usual half minute
    messages: list[Any] = [{"role": "user", "content": "remember me across death"}]
    first = ask("sync", messages, **OPTIONS)
    wait_until_stored(server, first.engram["conversation_id"])
    server.kill()
    server.start()
    messages += [first.message, {"role": "user", "content": "are you there?"}]
    second = ask("sync", messages, extra_body={}, timeout=240, **OPTIONS)
    assert second.engram["conversation_id"] == first.engram["conversation_id"]
    assert second.engram["tier"] in ("disk", "store")
    assert 0 < second.usage.prompt_tokens - second.engram["tokens_saved"] < 30
