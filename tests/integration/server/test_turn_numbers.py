"""Turns over HTTP whose replies come back in other tokens, each sent at once: numbers, branch and parents.

The model is made to spell its replies letter by letter, which no tokenizer does; everything else is the real engine.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.server.chat import ChatRenderer
from engram_runtime.snapshots.types import SnapshotConfig
from tests.support import loopback, patience
from tests.support.counting import Counted
from tests.support.serving import NAME, Running, serving
from tests.support.tiny import make_tiny

END = 2
"""<|im_end|> of every tiny checkpoint."""
TEXTS = ("Who wrote the book?", "And what is the capital of France?", "Thank you very much", "Hello there", "And now?")
REPLIES = ("Paris is the capital.", "The book is in Paris.", "Yes, I think so.", "No, I do not.", "Perhaps.")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
ARGUMENTS = {"place": "Paris"}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'


class Place:
    """A checkpoint, a store, and servers over them, one after the other."""

    def __init__(self, family: str, folder: Path) -> None:
        self.path = make_tiny(family, folder / "model", template="tools")
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.path)
        self.counted = Counted()
        self.store = folder / "store"
        self.messages: list[Any] = []
        self.turns: list[dict[str, Any]] = []

    def load(self) -> AsyncLLMEngine:
        config = EngineConfig(
            str(self.path), device="cpu", progress=False, max_num_seqs=4, **patience.ENGINE, **patience.ONE_SNAPSHOT
        )
        snapshots = SnapshotConfig(
            tenant_key=b"k" * 32,
            keep_last=100,
            gc_interval_seconds=0,
            store_uri=f"file://{self.store}",
            **patience.SNAPSHOTS,
        )
        return AsyncLLMEngine.from_config(config, snapshots, registry=self.counted.registry)

    def spelled(self, text: str) -> list[int]:
        """Other ids than those of the text."""
        ids = [i for letter in text for i in self.tokenizer.encode(letter, add_special_tokens=False)]
        assert self.tokenizer.decode(ids) == text
        assert ids != self.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, END]

    def ask(self, running: Running, message: Any, reply: str, **fields: Any) -> dict[str, Any]:
        """One turn behind all the others, as soon as the last one's reply is there."""
        self.messages.append(message)
        self.counted.say(self.spelled(reply))
        body = {"model": NAME, "messages": self.messages, "temperature": 0, "max_tokens": 200, **fields}
        answer = loopback.post(f"{running.url}/v1/chat/completions", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == reply
        self.messages.append({"role": "assistant", "content": reply})
        turn: dict[str, Any] = answer.json()["engram"]
        self.turns.append(turn)
        return turn

    def check(self, running: Running, conversation: str) -> None:
        """The turns so far count from 1, and each was stored on main as the continuation of the one before."""
        count = len(self.turns)
        assert [turn["turn_number"] for turn in self.turns] == list(range(1, count + 1))
        assert {turn["branch_name"] for turn in self.turns} == {"main"}
        rows = self.rows(running, conversation)
        assert {row["branch_name"] for row in rows} == {"main"}
        parents = {row["id"]: row["parent"] for row in rows}
        ids = [turn["snapshot_id"] for turn in self.turns]
        assert [parents[snapshot] for snapshot in ids] == [None, *ids[:-1]]

    def rows(self, running: Running, conversation: str) -> list[dict[str, Any]]:
        """All snapshots of the conversation, once they are stored."""
        loaded = running.server.state.loaded
        assert loaded is not None
        assert loaded.snapshots is not None
        assert running.loop is not None
        asyncio.run_coroutine_threadsafe(loaded.engine.flush(), running.loop).result(patience.SECONDS)
        assert loaded.snapshots.flush(patience.SECONDS)
        page = loopback.get(f"{running.url}/v1/snapshots", params={"conversation_id": conversation, "limit": 100})
        found: list[dict[str, Any]] = page.json()["data"]
        return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(params=["llama", "granite"], ids=["dense", "hybrid"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn is never prepared in time."""

    async def too_late(self: ChatRenderer, *of_what: Any) -> None:
        return None

    monkeypatch.setattr(ChatRenderer, "next_history", too_late)


@pytest.fixture(params=["never", "maybe"])
def prepared(request: pytest.FixtureRequest) -> None:
    """As `unprepared`, or prepared when the engine comes to it before the next turn does."""
    if request.param == "never":
        request.getfixturevalue("unprepared")


@pytest.mark.usefixtures("prepared")
def test_turns_that_are_sent_at_once_count(place: Place) -> None:
    with serving(place.load) as running:
        for text, reply in zip(TEXTS, REPLIES, strict=True):
            turn = place.ask(running, user(text), reply, conversation_id="c")
            assert turn["restored_tokens"] > 0 or turn["turn_number"] == 1
        place.check(running, "c")


@pytest.mark.usefixtures("prepared")
def test_a_turn_that_is_asked_again_has_its_number(place: Place) -> None:
    with serving(place.load) as running:
        for text, reply in zip(TEXTS[:3], REPLIES, strict=False):
            place.ask(running, user(text), reply, conversation_id="c")
        place.check(running, "c")
        kept, second, third = list(place.messages), place.turns[1], place.turns[2]
        place.messages = kept[:4]
        again = place.ask(running, user(TEXTS[2]), REPLIES[4], conversation_id="c")
        place.messages = kept[:2]
        edited = place.ask(running, user("Hello there"), REPLIES[3], conversation_id="c")
        after = place.ask(running, user(TEXTS[4]), REPLIES[2], conversation_id="c")
        assert [turn["turn_number"] for turn in (again, edited, after)] == [3, 2, 3]
        rows = {row["id"]: row for row in place.rows(running, "c")}
        parents = [rows[turn["snapshot_id"]]["parent"] for turn in (third, again, edited, after)]
        first = place.turns[0]
        assert parents == [turn["snapshot_id"] for turn in (second, second, first, edited)]
        # What was said before stays where it was.
        branches = [rows[turn["snapshot_id"]]["branch_name"] for turn in (first, second, third, again, edited)]
        assert branches[:3] == ["main"] * 3
        assert branches[3] != branches[4]
        assert all(branch.startswith("main~") for branch in branches[3:])


@pytest.mark.usefixtures("unprepared")
def test_a_turn_that_was_answered_alike_again_is_one_snapshot(place: Place) -> None:
    """A client that did not get the answer asks again; what goes on from it goes on from what is stored."""
    with serving(place.load) as running:
        for text, reply in zip(TEXTS[:2], REPLIES, strict=False):
            place.ask(running, user(text), reply, conversation_id="c")
        place.rows(running, "c")
        place.messages = place.messages[:2]
        again = place.ask(running, user(TEXTS[1]), REPLIES[1], conversation_id="c")
        assert again["turn_number"] == 2
        place.turns.pop()
        place.ask(running, user(TEXTS[2]), REPLIES[2], conversation_id="c")
        place.check(running, "c")


@pytest.mark.usefixtures("prepared")
def test_tool_results_count_as_turns(place: Place) -> None:
    """A tool answers faster than anything is prepared, and its call comes back as the client writes it down."""
    with serving(place.load) as running:
        place.ask(running, user(TEXTS[0]), REPLIES[0], conversation_id="c", tools=[WEATHER])
        place.ask(running, user(TEXTS[1]), CALL, conversation_id="c", tools=[WEATHER])
        for number, reply in enumerate((CALL, REPLIES[1])):
            call = {"id": f"call_{number}", "type": "function"}
            call["function"] = {"name": "weather", "arguments": json.dumps(ARGUMENTS, indent=2)}
            place.messages[-1] = {"role": "assistant", "content": None, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": f"call_{number}", "content": f"rain, {number} degrees"}
            place.ask(running, result, reply, conversation_id="c", tools=[WEATHER])
        place.ask(running, user(TEXTS[2]), REPLIES[2], conversation_id="c", tools=[WEATHER])
        place.check(running, "c")


@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize(("family", "processes"), [("llama", 3), ("granite", 2)], ids=["dense", "hybrid"])
def test_another_process_goes_on_counting(family: str, processes: int, tmp_path: Path) -> None:
    """Of the stored turn it takes what lies before the reply, a hybrid what lies before the message."""
    place = Place(family, tmp_path)
    # Long enough for a hybrid to keep the state behind it.
    place.messages.append({"role": "system", "content": "Please answer the user briefly. " * 8})
    for number in range(processes):
        with serving(place.load) as running:
            turn = place.ask(running, user(TEXTS[number]), REPLIES[number], conversation_id="c")
            assert turn["tier"] == ("store" if number else None)
            place.check(running, "c")


@pytest.mark.usefixtures("prepared")
def test_new_messages_alone_count_too(place: Place) -> None:
    with serving(place.load) as running:
        place.ask(running, user(TEXTS[0]), REPLIES[0], conversation_id="c")
        for text, reply in zip(TEXTS[1:], REPLIES[1:], strict=True):
            place.messages = []
            place.ask(running, user(text), reply, conversation_id="c", delta=True)
        place.check(running, "c")
