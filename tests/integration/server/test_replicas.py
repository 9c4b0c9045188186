"""Two servers over one store: what one replica did is true on the other at once, whatever that one remembers."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.snapshots.types import SnapshotConfig
from tests.support import loopback, patience
from tests.support.serving import NAME, serving
from tests.support.tiny import make_tiny

KEEP = 100


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("model")
    make_tiny("granite", checkpoint)
    store = tmp_path_factory.mktemp("store")

    def load():
        snapshots = SnapshotConfig(
            tenant_key=b"k" * 32, **patience.SNAPSHOTS, store_uri=f"file://{store}", keep_last=KEEP
        )
        return AsyncLLMEngine.from_config(
            EngineConfig(model=str(checkpoint), progress=False, **patience.ENGINE), snapshots
        )

    with serving(load) as first, serving(load) as second:
        yield first, second


def ask(replica, text, **fields):
    body = {"model": NAME, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8, **fields}
    answer = loopback.post(f"{replica.url}/v1/chat/completions", json=body, timeout=240)
    deadline = time.monotonic() + 240
    while replica.server.state.background:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert replica.server.state.loaded.snapshots.flush(240)
    return answer


def test_a_delta_follows_the_newest_turn_wherever_it_was_made(replicas):
    sizes = []
    for turn in range(5):
        answer = ask(replicas[turn % 2], f"Turn {turn}, please", conversation_id="turns", delta=turn > 0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["engram"]["turn_number"] == turn + 1
        sizes.append(answer.json()["usage"]["prompt_tokens"])
    assert all(after - before > sizes[0] // 2 for before, after in pairwise(sizes)), sizes


def test_what_one_replica_deleted_the_other_does_not_remember(replicas):
    first, second = replicas
    assert ask(first, "My secret word is marigold", conversation_id="secret").status_code == 200
    there = ask(second, "What is it?", conversation_id="secret", delta=True).json()["engram"]
    assert there["turn_number"] == 2
    rows = loopback.get(f"{first.url}/v1/snapshots", params={"conversation_id": "secret"}).json()["data"]
    assert {row["turn_number"] for row in rows} == {1, 2}
    for row in rows:
        assert loopback.delete(f"{first.url}/v1/snapshots/{row['id']}").status_code == 200
    for fields, status in (
        ({"restore_from": there["snapshot_id"]}, 404),
        ({"restore_from": "secret:2"}, 404),
        ({"restore_from": "secret:1"}, 404),
        ({"conversation_id": "secret", "delta": True}, 409),
    ):
        for replica in replicas:
            assert ask(replica, "Tell me", auto_save=False, **fields).status_code == status, fields


def test_a_turn_that_is_not_written_yet_is_continued_from_memory(replicas):
    first, _ = replicas
    service = first.server.state.loaded.snapshots
    body = {"model": NAME, "messages": [{"role": "user", "content": "One"}], "max_tokens": 8, "conversation_id": "fast"}
    for turn in range(1, 6):
        answer = loopback.post(f"{first.url}/v1/chat/completions", json={**body, "delta": turn > 1}, timeout=240)
        assert answer.status_code == 200, answer.text
        assert answer.json()["engram"]["turn_number"] == turn
    assert service.flush(240)


def test_a_turn_of_a_few_tokens_on_another_replica_counts(replicas):
    """All of it would be computed again sooner than it is looked for, yet it is a turn of the conversation."""
    messages = []
    for turn, text in enumerate(("Please tell me about Paris and the book. " * 40, "Yes", "No", "Yes")):
        messages.append({"role": "user", "content": text})
        answer = ask(replicas[turn % 2], "", messages=messages, conversation_id="short", max_tokens=2)
        assert answer.status_code == 200, answer.text
        assert answer.json()["engram"]["turn_number"] == turn + 1
        assert answer.json()["engram"]["branch_name"] == "main"
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    rows = loopback.get(f"{replicas[0].url}/v1/snapshots", params={"conversation_id": "short"}).json()["data"]
    assert {row["branch_name"] for row in rows} == {"main"}
