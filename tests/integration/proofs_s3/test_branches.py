"""Two writers of one turn: the loser's branch is called by its own name everywhere, as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.proofs.places import Message, Place, post, reply, service_of, settle, user
from tests.support import loopback
from tests.support.bucket_site import Bucket
from tests.support.serving import Running

FIELDS = {"max_tokens": 8, "ignore_eos": True, "conversation_id": "shared"}


def say(running: Running, messages: list[Message], text: str) -> dict[str, Any]:
    messages.append(user(text))
    answer = post(running, messages, **FIELDS)
    messages.append(reply(answer))
    told: dict[str, Any] = answer["engram"]
    return told


def get(running: Running, path: str, **query: str) -> Any:
    answer = loopback.get(f"{running.url}/v1/snapshots{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_losers_branch_has_its_name_everywhere(checkpoint: Callable[..., Path], kind: str, bucket: Bucket) -> None:
    place, other = Place(checkpoint(kind), bucket.fields), Place(checkpoint(kind), bucket.fields)
    with place.serve() as winner, other.serve() as loser:
        first: list[Message] = []
        say(winner, first, "Who wrote the book?")
        settle(winner)
        second = list(first)
        assert say(loser, second, "And when was that?")["turn_number"] == 2
        assert say(winner, first, "What is it about?")["turn_number"] == 2
        settle(winner)
        settle(loser)
        by_branch = {row["branch_name"]: row for row in get(winner, "", conversation_id="shared")["data"]}
        branches = sorted(by_branch)
        assert (len(branches), branches[0]) == (2, "main")
        assert branches[1].startswith("main~")
        lost = [running for running in (winner, loser) if service_of(running).counters().get("branches_opened")]
        assert len(lost) == 1
        messages = first if lost[0] is winner else second
        told = say(lost[0], messages, "Is it long?")
        assert (told["branch_name"], told["turn_number"]) == (branches[1], 3)
        assert told["restored_tokens"] > told["prefilled_tokens"]
        settle(lost[0])
        shown = get(lost[0], f"/{told['snapshot_id']}")
        assert (shown["branch_name"], shown["turn_number"]) == (branches[1], 3)
        events = get(lost[0], "/events")["data"]
        of_branch = {
            event["snapshot"]["turn_number"]
            for event in events
            if event["kind"] == "saved" and event["snapshot"] and event["snapshot"]["branch_name"] == branches[1]
        }
        assert 3 in of_branch
    # A machine that saw none of it goes on where the history that it is sent belongs.
    with Place(checkpoint(kind), bucket.fields).serve() as stranger:
        told = say(stranger, messages, "Thank you.")
        assert (told["branch_name"], told["turn_number"], told["tier"]) == (branches[1], 4, "store")
        settle(stranger)
        assert get(stranger, f"/{told['snapshot_id']}")["branch_name"] == branches[1]
        assert len({row["branch_name"] for row in get(stranger, "", conversation_id="shared")["data"]}) == 2
