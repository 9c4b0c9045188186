"""A server over a checkpoint and the folders of its tiers; each `serve` is a new process's state over them."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import transformers

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.snapshots.types import SnapshotConfig, Snapshots
from tests.support import loopback, patience
from tests.support.counting import Counted
from tests.support.proofs import KEY
from tests.support.serving import NAME, Running, serving

Message = dict[str, Any]


@dataclass
class Place:
    path: Path
    tiers: dict[str, Any]
    """Fields of SnapshotConfig that name the durable tiers."""
    counted: Counted = field(default_factory=Counted)

    def __post_init__(self) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.path)

    def serve(self, **server: Any) -> AbstractContextManager[Running]:
        """server: fields of ServerConfig."""
        return serving(self._load, **server)

    def _load(self) -> AsyncLLMEngine:
        config = EngineConfig(
            str(self.path),
            device="cpu",
            progress=False,
            max_num_seqs=4,
            kv_cache_tokens=4096,
            **patience.ENGINE,
            **patience.ONE_SNAPSHOT,
        )
        snapshots = SnapshotConfig(tenant_key=KEY, gc_interval_seconds=0, **patience.SNAPSHOTS, **self.tiers)
        return AsyncLLMEngine.from_config(config, snapshots, registry=self.counted.registry)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def send(running: Running, messages: list[Message], *, key: str = "", **fields: Any) -> httpx.Response:
    body = {"model": NAME, "messages": messages, "temperature": 0, **fields}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return loopback.post(f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=240)


def post(running: Running, messages: list[Message], **fields: Any) -> dict[str, Any]:
    answer = send(running, messages, **fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def reply(answer: dict[str, Any]) -> Message:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def service_of(running: Running) -> Snapshots:
    loaded = running.server.state.loaded
    assert loaded is not None
    assert loaded.snapshots is not None
    return loaded.snapshots


def settle(running: Running, *, stored: bool = True) -> None:
    """Until the turn was warmed up for its successor and, with `stored`, is in every tier."""
    deadline = time.monotonic() + patience.SECONDS
    while running.server.state.background:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    if stored:
        assert service_of(running).flush(patience.SECONDS)


def looked_around(running: Running) -> dict[str, float]:
    """The counters once the server has counted what it found in a store that is not empty: what a request does to
    them is then told from what the start does, which lists once, and reads a manifest to see whose key signed it.
    """
    deadline = time.monotonic() + 240
    while not next(tier.objects for tier in service_of(running).status() if tier.name == "store"):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return service_of(running).counters()
