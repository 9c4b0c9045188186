"""A machine that has nothing but the store restores the conversation of a client that sends no ids; a stranger with
the very same prompt finds nothing, reads nothing and may name nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engram_runtime.snapshots import service
from tests.integration.proofs.places import Message, Place, looked_around, post, reply, send, service_of, settle, user
from tests.support.serving import NAME, Running

QUESTIONS = ("Who wrote the book? Please answer the user briefly.", "What is the capital of France?", "Thank you!")
KEYS = {"alice": "key-of-alice", "mallory": "key-of-mallory"}


@pytest.fixture(autouse=True)
def no_regular_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what others deleted, every half a minute: on a busy machine it falls into what is counted here."""
    monkeypatch.setattr(service, "POLL_SECONDS", 3600.0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    for tenant, key in KEYS.items():
        (folder / tenant).write_text(key)
    return folder


def plain_chat(running: Running, messages: list[Message]) -> openai.types.chat.ChatCompletion:
    """As any program does that has never heard of this server."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEYS["alice"], max_retries=0) as client:
        return client.chat.completions.create(
            model=NAME,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=16,
            extra_body={"ignore_eos": True},
        )


def test_from_an_empty_machine(
    checkpoint: Callable[..., Path], kind: str, keys: Path, tmp_path: Path, store: dict[str, Any]
) -> None:
    path = checkpoint(kind)
    first = Place(path, {**store, "disk_path": tmp_path / "disk of the first machine"})
    with Place(path, {}).serve(api_keys_dir=keys) as forgetful:
        expected = []
        messages: list[Message] = []
        for question in QUESTIONS:
            messages.append(user(question))
            answer = plain_chat(forgetful, messages).choices[0].message.content
            messages.append({"role": "assistant", "content": answer})
            expected.append(answer)

    messages = []
    with first.serve(api_keys_dir=keys) as running:
        for question in QUESTIONS[:2]:
            messages.append(user(question))
            answer = plain_chat(running, messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            settle(running)
        known = service_of(running).resolve("alice", answer.model_extra["engram"]["conversation_id"])

    second = Place(path, {**store, "disk_path": tmp_path / "empty disk of the second machine"})
    messages.append(user(QUESTIONS[2]))
    with second.serve(api_keys_dir=keys) as running:
        before, at_start = second.counted.rows, looked_around(running)
        answer = plain_chat(running, messages)
        told = answer.model_extra["engram"]
        assert answer.choices[0].message.content == expected[2]
        assert (told["tier"], told["restored_tokens"], told["restore_failed"]) == ("store", known.tokens, False)
        assert told["restored_tokens"] >= 0.95 * (answer.usage.prompt_tokens - 20)
        assert told["prefilled_tokens"] == answer.usage.prompt_tokens - known.tokens < 20
        assert answer.usage.prompt_tokens_details.cached_tokens == known.tokens
        # Nothing was listed to find it, and the conversation was recognised.
        counters = service_of(running).counters()
        assert counters["lists.store"] == at_start["lists.store"] == 1
        settle(running)
        assert 1 <= counters["probes.store"] <= 16
        assert (told["conversation_id"], told["turn_number"]) == (known.conversation_id, 3)
        assert second.counted.rows - before < told["restored_tokens"]


def test_another_tenant_finds_nothing(
    checkpoint: Callable[..., Path], kind: str, keys: Path, tmp_path: Path, store: dict[str, Any]
) -> None:
    path = checkpoint(kind)
    tiers = {**store, "disk_path": tmp_path / "disk"}
    alice, mallory = KEYS["alice"], KEYS["mallory"]
    messages = [user(QUESTIONS[0])]
    length = {"max_tokens": 12, "ignore_eos": True}
    with Place(path, tiers).serve(api_keys_dir=keys) as running:
        first = post(running, messages, key=alice, conversation_id="secret", **length)
        settle(running)
        messages += [reply(first), user(QUESTIONS[1])]
        snapshot_id = service_of(running).resolve("alice", "secret").snapshot_id
        # The same prompt in the same process: device and host hold it, and it is not found there either.
        told = post(running, messages, key=mallory, auto_save=False, **length)["engram"]
        assert (told["restored_tokens"], told["tier"], told["bytes"]) == (0, None, 0)
        assert told["prefilled_tokens"] > 40

    for fields in ({}, {"conversation_id": "secret"}):
        with Place(path, tiers).serve(api_keys_dir=keys) as running:
            at_start = looked_around(running)
            answer = post(running, messages, key=mallory, auto_save=False, **fields, **length)
            told = answer["engram"]
            assert (told["restored_tokens"], told["tier"], told["bytes"]) == (0, None, 0)
            assert told["prefilled_tokens"] == answer["usage"]["prompt_tokens"]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            read_nothing(running, at_start)

    with Place(path, tiers).serve(api_keys_dir=keys) as running:
        at_start = looked_around(running)
        for selector in (snapshot_id, "secret:1"):
            refused = send(running, messages[-1:], key=mallory, restore_from=selector)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "snapshot_not_found")
        refused = send(running, messages[-1:], key=mallory, conversation_id="secret", delta=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "need_full_history")

        client = httpx.Client(base_url=running.url, headers={"authorization": f"Bearer {mallory}"}, timeout=240)
        with client as http:
            assert http.get("/v1/snapshots").json()["data"] == []
            assert http.get("/v1/snapshots", params={"conversation_id": "secret"}).json()["data"] == []
            assert http.get("/v1/snapshots/events").json()["data"] == []
            assert http.get(f"/v1/snapshots/{snapshot_id}").status_code == 404
            assert http.delete(f"/v1/snapshots/{snapshot_id}").status_code == 404
            named = http.post("/v1/chat/completions", headers={"x-engram-tenant": "alice"}, json={})
            assert named.status_code == 403

        read_nothing(running, at_start)
        before = service_of(running).counters()
        # It is all still there, for its owner.
        told = post(running, messages, key=alice, **length)["engram"]
        assert (told["tier"], told["conversation_id"], told["turn_number"]) == ("disk", "secret", 2)
        assert service_of(running).counters()["bytes_read.disk"] > before.get("bytes_read.disk", 0)


def read_nothing(running: Running, at_start: dict[str, float]) -> None:
    """Not one byte came from any tier: whatever was looked for under the other's key, nothing answered."""
    counters = service_of(running).counters()
    for tier in ("disk", "store"):
        assert counters.get(f"gets.{tier}", 0) > at_start.get(f"gets.{tier}", 0)
        assert counters.get(f"bytes_read.{tier}", 0) == at_start.get(f"bytes_read.{tier}", 0)
