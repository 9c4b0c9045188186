"""Recall: a request that carries only its new message is answered as if it had carried everything.

Full history would recall without any restore, so this is the request that only restored state can answer. Over real
connections.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.proofs.conftest import Stored
from tests.integration.proofs.places import Message, Place, post, reply, send, service_of, settle, user
from tests.support import loopback
from tests.support.proofs import Site, Talk, message, report
from tests.support.serving import Running
from tests.support.tampering import tamper_files, zeroed

SECRET = user('The secret word is "marigold", and the boat was blue, not green. Please answer the user briefly.')
QUESTION = user("What is the secret word?")
LENGTH = {"max_tokens": 24, "ignore_eos": True, "logprobs": True}


@pytest.fixture
def place(checkpoint: Callable[..., Path], kind: str, tier: str, tmp_path: Path, store: dict[str, Any]) -> Place:
    fields = {"disk": {"disk_path": tmp_path / "disk"}, "store": store}
    return Place(checkpoint(kind), fields.get(tier, {}))


def remember(running: Running) -> tuple[list[Message], str]:
    """Turn 1: the history it leaves, and the id of its snapshot."""
    first = post(running, [SECRET], conversation_id="boat", max_tokens=16, ignore_eos=True)
    settle(running)
    return [SECRET, reply(first)], service_of(running).resolve("default", "boat", 1).snapshot_id


def words(answer: dict[str, Any]) -> list[tuple[str, float]]:
    content = answer["choices"][0]["logprobs"]["content"]
    return [(entry["token"], entry["logprob"]) for entry in content]


def recall(place: Place, running: Running, selector: str, tier: str, whole: dict[str, Any]) -> None:
    """Only the new message is sent, only the new message is computed, and the answer is that of the full history."""
    before = place.counted.rows
    answer = post(running, [QUESTION], restore_from=selector, auto_save=False, **LENGTH)
    told, usage = answer["engram"], answer["usage"]
    new = usage["prompt_tokens"] - told["restored_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert told["prefilled_tokens"] == new == place.counted.rows - before - (LENGTH["max_tokens"] - 1)
    assert new < 20 < 40 < told["restored_tokens"]
    assert (told["tier"], told["restore_failed"], told["restore_error"]) == (tier, False, None)
    assert (told["conversation_id"], told["turn_number"]) == ("boat", 2)
    assert [token for token, _ in words(answer)] == [token for token, _ in words(whole)]
    for (_, ours), (_, theirs) in zip(words(answer), words(whole), strict=True):
        assert abs(ours - theirs) < 1e-3


@pytest.mark.parametrize("tier", ["gpu", "disk", "store"])
def test_only_the_new_message(place: Place, tier: str) -> None:
    with place.serve() as running:
        history, snapshot_id = remember(running)
        if tier == "gpu":
            with Place(place.path, {}).serve() as elsewhere:
                whole = post(elsewhere, [*history, QUESTION], **LENGTH)
                blank = post(elsewhere, [QUESTION], **LENGTH)
            recall(place, running, "boat:1", "gpu", whole)
            recall(place, running, snapshot_id, "gpu", whole)
            assert words(blank) != words(whole)  # without its memory it would have said something else
            return
    with Place(place.path, {}).serve() as elsewhere:
        whole = post(elsewhere, [*history, QUESTION], **LENGTH)
        assert whole["engram"]["restored_tokens"] == 0
    for selector in ("boat:1", snapshot_id):
        with place.serve() as running:
            recall(place, running, selector, tier, whole)


@pytest.mark.parametrize("tier", ["store"])
@pytest.mark.parametrize(("kind", "part"), [("dense", "kv"), ("hybrid", "kv"), ("hybrid", "state")])
def test_half_a_memory_is_none(place: Place, tier: str, part: str, stored: Stored) -> None:
    """Keys and values alone, or the state alone: it fails closed, and says so."""
    with place.serve() as running:
        history, _ = remember(running)
    with Place(place.path, {}).serve() as elsewhere:
        whole = post(elsewhere, [*history, QUESTION], **LENGTH)
    with stored() as files:
        assert tamper_files(files, part, zeroed)
    with place.serve() as running:
        answer = post(running, [QUESTION], restore_from="boat:1", auto_save=False, **LENGTH)
    told = answer["engram"]
    assert told["restore_failed"]
    assert "checksum" in told["restore_error"]
    assert (told["restored_tokens"], told["tier"]) == (0, None)
    assert told["prefilled_tokens"] == answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    # The messages are intact, so the caller still gets the right answer: computed, not restored.
    assert [token for token, _ in words(answer)] == [token for token, _ in words(whole)]


@pytest.mark.parametrize("tier", ["store"])
def test_an_unknown_snapshot_is_an_error(place: Place, tier: str) -> None:
    """Never a silent answer without the memory that was asked for."""
    with place.serve() as running:
        _, snapshot_id = remember(running)
        for selector in ("boat:9", "ship:1", "0" * 32):
            answer = send(running, [QUESTION], restore_from=selector)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "snapshot_not_found")
        assert loopback.delete(f"{running.url}/v1/snapshots/{snapshot_id}").status_code == 200
        for selector in ("boat:1", snapshot_id):
            assert send(running, [QUESTION], restore_from=selector).status_code == 404


@pytest.mark.parametrize("tier", ["gpu", "host", "disk", "store"])
def test_a_named_snapshot_is_restored_from_every_tier(make_site: Callable[..., Site], kind: str, tier: str) -> None:
    """By the engine itself; what the device already holds counts as restored, not as a failure."""
    site = make_site(kind, tier)
    talk = Talk(site)
    talk.turn(message(40, 1))
    fork = talk.branch("what-if")
    site.settle()
    named = site.service.resolve("default", "talk", 1).snapshot_id
    talk.turn(message(20, 2))
    site.evict()
    told = report(fork.turn(message(20, 3), restore_from=named))
    assert (told.tier, told.restore_failed, told.restore_error) == (tier, False, None)
    assert told.restored_tokens in (47, 48)
    assert (told.branch_name, told.turn_number) == ("what-if", 2)
