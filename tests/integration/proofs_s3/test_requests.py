"""What a turn costs in requests, counted on the wire: writes are the dear ones, at most five a turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.proofs.places import Message, Place, post, reply, settle, user
from tests.support.bucket_site import Bucket
from tests.support.s3_faults import FaultProxy, faulty

SYSTEM: Message = {"role": "system", "content": "You help people to find their way in an old and crooked town. " * 3}
MOST_WRITES = 5


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[FaultProxy]:
    with faulty(bucket.server.url) as running:
        yield running


def kinds_of_writes(proxy: FaultProxy) -> list[str]:
    """The kind of each object written since the last reading, sorted. Deletions and copies cost writes too."""
    seen = [seen for seen in proxy.seen if seen.method in ("PUT", "POST")]
    proxy.clear()
    return sorted(seen.path.split("/v1/")[1].split("/")[2] for seen in seen)


def test_writes_of_a_turn(checkpoint: Callable[..., Path], bucket: Bucket, proxy: FaultProxy, kind: str) -> None:
    """KV, snapshot, anchors (at user_start too, where there was nothing before), head; whatever the architecture."""
    seen_through = Bucket(bucket.server, replace(bucket.options, endpoint_url=proxy.url))
    place = Place(checkpoint(kind), seen_through.fields)
    with place.serve() as running:
        proxy.clear()
        messages = [SYSTEM]
        for text, anchors in (("Where is the mill?", 2), ("And the tower?", 2 if kind == "dense" else 1)):
            messages.append(user(text))
            answer = post(running, messages, max_tokens=8, ignore_eos=True)
            messages.append(reply(answer))
            settle(running)
            writes = kinds_of_writes(proxy)
            assert writes == ["anchor"] * anchors + ["kv", "ref", "snap"]
            assert len(writes) <= MOST_WRITES


def test_a_system_prompt_is_restored_for_a_stranger_conversation(
    checkpoint: Callable[..., Path], bucket: Bucket, kind: str
) -> None:
    """What the second anchor is for: the same system prompt on an empty machine, another first question."""
    with Place(checkpoint(kind), bucket.fields).serve() as running:
        post(running, [SYSTEM, user("Where is the mill?")], max_tokens=8, ignore_eos=True)
        settle(running)
    asked = [SYSTEM, user("Which bridge is the oldest one?")]
    with Place(checkpoint(kind), {}).serve() as running:
        expected = post(running, asked, max_tokens=8, ignore_eos=True)
    with Place(checkpoint(kind), bucket.fields).serve() as running:
        answer = post(running, asked, max_tokens=8, ignore_eos=True)
        told = answer["engram"]
        assert reply(answer) == reply(expected)
        assert (told["tier"], told["turn_number"]) == ("store", 1)
        assert told["restored_tokens"] > told["prefilled_tokens"] > 0
        settle(running)
        if kind == "hybrid":
            # The state that was used is the one that the stranger's snapshot keeps beside its own.
            again = post(running, asked, max_tokens=8, ignore_eos=True)
            assert again["engram"]["tier"] == "gpu"
