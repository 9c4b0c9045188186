"""A bucket that is away for a whole conversation: answers as ever, the status says why, and what was kept is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engram_runtime.snapshots.io.s3 import store as s3_store
from tests.integration.proofs.places import Place, service_of
from tests.integration.proofs.test_trouble import Chat, chat, heal, in_trouble, tier
from tests.support.bucket_site import Bucket
from tests.support.s3_faults import FaultProxy, faulty
from tests.support.virtual_clock import VirtualClock

__all__ = ["chat"]

FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "500": ("answer", {"status": 500, "code": "InternalError"}, "ServerError"),
    "slow down": ("answer", {"status": 503, "code": "SlowDown"}, "Throttled"),
    "denied": ("answer", {"status": 403, "code": "AccessDenied"}, "AccessDenied"),
    "clock skew": ("answer", {"status": 403, "code": "RequestTimeTooSkewed"}, "ClockSkew"),
    "bucket gone": ("answer", {"status": 404, "code": "NoSuchBucket"}, "BucketMissing"),
    "no answer": ("silence", {}, "Timeout"),
}


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[FaultProxy]:
    with faulty(bucket.server.url) as running:
        yield running


@pytest.fixture
def place(
    checkpoint: Callable[..., Path],
    kind: str,
    bucket: Bucket,
    proxy: FaultProxy,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    """A server that reaches the bucket through the proxy and tries a few times: by a clock that nobody waits for, so
    that a busy machine is no trouble. Only silence ends with a socket's own time limit."""
    monkeypatch.setattr(s3_store, "SystemClock", VirtualClock)
    silent = request.node.callspec.params.get("fault") == "no answer"
    limits = {"deadline_seconds": 0.3, "read_timeout_seconds": 1.0} if silent else {"deadline_seconds": 2.0}
    brief = replace(bucket.options, endpoint_url=proxy.url, **limits)
    return Place(checkpoint(kind), Bucket(bucket.server, brief).fields)


@pytest.mark.parametrize(("fault", "kind"), [(name, ("dense", "hybrid")[i % 2]) for i, name in enumerate(FAULTS)])
def test_away_for_a_whole_conversation(
    checkpoint: Callable[..., Path], chat: Chat, place: Place, bucket: Bucket, proxy: FaultProxy, fault: str, kind: str
) -> None:
    """Away before the server starts, and until the conversation is over; then a new machine goes on from the bucket."""
    action, settings, reason = FAULTS[fault]
    proxy.inject(action, **settings)
    with place.serve() as running:
        for text in ("Who wrote the book?", "What is the capital of France?", "Is it far away?"):
            told = chat.say(running, text, stored=False)
            # Device and host remember. That the bucket could not be asked is said of a turn that it might have helped.
            assert (told["tier"] in ("gpu", "host")) == (told["restored_tokens"] > 0) == (told["turn_number"] > 1)
            assert told["restore_failed"] == bool(told["restore_error"]) == (told["turn_number"] == 1)
            assert proxy.url not in str(told["restore_error"])
        assert in_trouble(running, "store", reason)["message"]
        proxy.clear()
        heal(running, "store", chat)
        assert all(report.ok for report in service_of(running).fsck())
    with Place(checkpoint(kind), bucket.fields).serve() as running:
        told = chat.say(running, "What did I ask first?")
        assert (told["tier"], told["restore_failed"]) == ("store", False)


def test_away_in_the_middle_and_never_back(
    checkpoint: Callable[..., Path], chat: Chat, place: Place, bucket: Bucket, proxy: FaultProxy, kind: str
) -> None:
    """The bucket dies, and later the server too: the turns before are whole, those after are computed again."""
    with place.serve(drain_timeout=1.0) as running:
        chat.say(running, "Who wrote the book?")
        assert tier(running, "store")["ready"]
        proxy.inject("drop")
        for text in ("What is the capital of France?", "Is it far away?"):
            assert chat.say(running, text, stored=False)["tier"] in ("gpu", "host")
        assert in_trouble(running, "store", "ConnectionLost")
    with Place(checkpoint(kind), bucket.fields).serve() as running:
        told = chat.say(running, "What did I ask first?")
        assert (told["tier"], told["restore_failed"]) == ("store", False)
        assert 0 < told["restored_tokens"] < told["prefilled_tokens"]
        assert all(report.ok for report in service_of(running).fsck())
