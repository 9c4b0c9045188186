"""kill -9 of a real `engram serve` at random moments while it saves: nothing is torn, nothing that was reported stored
is lost, and the conversation goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engram_runtime.cli.main import main as engram
from tests.integration.proofs.places import Message, Place, post, reply, user
from tests.support import loopback
from tests.support.engine_processes import EngineProcesses
from tests.support.ports import free_base

LIVES = 4
QUESTIONS = [
    f"{words} {number}?"
    for number, words in enumerate(
        ("What is the capital of France", "Who wrote the book", "Was it cheaper to compute or to copy", "And then") * 2,
        1,
    )
]
LENGTH = {"max_tokens": 10, "ignore_eos": True}


@dataclass(frozen=True)
class Tier:
    """A durable tier, as `engram serve` and as `engram snapshots` are told of it."""

    serve: list[str]
    snapshots: list[str]
    holds: Callable[[], int]
    """How many objects there are now."""


def folder_tier(folder: Path, *serve: str) -> Tier:
    return Tier(
        list(serve), ["--store", f"file://{folder}"], lambda: sum(1 for path in folder.rglob("*") if path.is_file())
    )


class Child:
    """One life of the server after the other, on one port and over the same tiers."""

    def __init__(self, processes: EngineProcesses, model: Path, folder: Path, tiers: list[Tier]) -> None:
        self.folder = folder
        self._processes = processes
        self.port = free_base([0, 1])
        self.admin = self.port + 1
        self.tiers = tiers
        self.key = folder / "key"
        self.key.write_bytes(b"k" * 32)
        self.key.chmod(0o600)
        self._arguments = ["serve", "--model", str(model), "--served-model-name", "tiny", "--device", "cpu"]
        self._arguments += ["--port", str(self.port), "--admin-port", str(self.admin), "--max-num-seqs", "4"]
        self._arguments += ["--kv-cache-tokens", "4096", "--tenant-key-file", str(self.key)]
        self._arguments += [argument for tier in tiers for argument in tier.serve]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        log = self.folder / "log"
        self.process = self._processes.start(self._arguments, log)
        deadline = time.monotonic() + 240
        while True:
            with suppress(httpx.HTTPError):
                if loopback.get(f"{self.url}/health/ready").status_code == 200:
                    return
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()

    def objects(self) -> int:
        return sum(tier.holds() for tier in self.tiers)

    def stored(self, conversation: str, turn: int) -> dict[str, Any]:
        """Wait until the server says that it has stored the turn with its answer, as the next one will render it."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            page = loopback.get(f"{self.url}/v1/snapshots", params={"conversation_id": conversation}).json()["data"]
            for item in page:
                stored = item["boundary"] == "next_history" and "store" in item["tiers"]
                if stored and item["turn_number"] == turn:
                    found: dict[str, Any] = item
                    return found
            time.sleep(0.02)
        raise AssertionError(f"turn {turn} was not stored: {page}")


class Strangers:
    """Others chat all the time, so that there is always something being saved."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._child.url, timeout=30) as http, suppress(httpx.HTTPError):
            for number in range(1000):
                if self._stop.is_set():
                    return
                body = {"model": "tiny", "messages": [user(f"Number {number} says hello")], "max_tokens": 3}
                http.post("/v1/chat/completions", json=body)
                self._stop.wait(0.05)  # warming up yields to any request: leave it room

    def join(self) -> None:
        self._stop.set()
        self._thread.join(30)


def wait_for_a_moment(child: Child, chooser: random.Random, objects: int) -> None:
    """A moment within the save: so many objects later, or so much time."""
    if chooser.random() < 0.5:
        time.sleep(chooser.uniform(0.0, 0.3))
        return
    wanted = objects + chooser.randrange(1, 6 * len(child.tiers))
    deadline = time.monotonic() + 1.0
    while child.objects() < wanted and time.monotonic() < deadline:
        time.sleep(0.0005)


def fsck(child: Child, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What `engram snapshots fsck` says of each tier; anything torn, missing or forged makes it fail."""
    found = []
    for tier in child.tiers:
        capsys.readouterr()
        code = engram(["snapshots", "fsck", "--json", *tier.snapshots, "--tenant-key-file", str(child.key)])
        report = json.loads(capsys.readouterr().out)
        assert code == 0, report
        assert {problem["kind"] for problem in report["problems"]} <= {"orphan"}
        found.append(report)
    return found


def test_killed_while_saving(
    checkpoint: Callable[..., Path],
    processes: EngineProcesses,
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk, store = tmp_path / "disk", tmp_path / "store"
    tiers = [
        folder_tier(store, "--snapshot-store", f"file://{store}"),
        folder_tier(disk, "--snapshot-disk-path", str(disk)),
    ]
    path = checkpoint(kind)
    survive(path, Child(processes, path, tmp_path, tiers), random.Random(f"kill {kind}"), capsys)


def survive(path: Path, child: Child, chooser: random.Random, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversation over several lives, each ended while a turn of it is saved."""
    with Place(path, {}).serve() as never_killed:
        expected: list[Message] = []
        for question in QUESTIONS[: 2 * LIVES]:
            expected.append(user(question))
            expected.append(reply(post(never_killed, expected, **LENGTH)))

    messages: list[Message] = []
    conversation, promised = None, 0
    for life in range(LIVES):
        child.start()
        strangers = Strangers(child)
        for half in range(2):
            messages.append(user(QUESTIONS[2 * life + half]))
            objects = child.objects()
            answer = ask(child, messages)
            told = answer["engram"]
            messages.append(reply(answer))
            assert messages == expected[: len(messages)]
            assert (told["restore_failed"], told["restore_error"]) == (False, None)
            assert told["restored_tokens"] + told["prefilled_tokens"] == answer["usage"]["prompt_tokens"]
            assert told["restored_tokens"] >= promised
            assert told["conversation_id"] == (conversation or told["conversation_id"])
            conversation = told["conversation_id"]
            if half == 0:
                assert told["tier"] in (("disk", "store") if life else (None, "gpu"))
                promised = child.stored(conversation, told["turn_number"])["tokens"]
        if life < LIVES - 1:
            wait_for_a_moment(child, chooser, objects)
        child.kill()
        strangers.join()
        snapshots = [report["snapshots"] for report in fsck(child, capsys)]
        assert min(snapshots) > 0


def ask(child: Child, messages: list[Message]) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "temperature": 0, **LENGTH}
    answer = loopback.post(f"{child.url}/v1/chat/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
