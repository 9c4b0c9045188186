"""The second turn finds the first: at least 95 % of the history is taken over, whatever the template does to it.

Through the server's chat path, for clients that send their history and for those that name their conversation. The
replies are scripted, so that thoughts and tool calls are in them; everything else is computed by the real engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.proofs.places import Message, Place, post, reply, settle, user
from tests.support.serving import Running

END = 2
"""<|im_end|> of every tiny checkpoint."""
QUESTION = "What is the capital of France, and who wrote the book about it? Please answer the user briefly."
ANSWER = "Paris is the capital of France. Who wrote the book? I do not know, but I could look it up."
THOUGHT = "<think>\nThe user asks about the capital of France. It is Paris; the book I do not know.\n</think>\n\n"
SYSTEM = {"role": "system", "content": "The assistant remembers that the secret word is marigold."}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a book",
        "parameters": {"type": "object", "properties": {"title": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"title": "Paris"}}\n</tool_call>'
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "look_up", "arguments": json.dumps({"title": "Paris"})},
        }
    ],
}


@dataclass(frozen=True)
class Case:
    """What is asked, what the model says, what the client sends back, and what it sends with it."""

    template: str
    reply: str = ANSWER
    before: tuple[Message, ...] = ()
    echo: Message | None = None
    """The reply as the client puts it into its history; None: as it came."""
    then: tuple[str, str] = ("user", "And how many people live there today, yes or no or maybe?")
    fields: tuple[tuple[str, Any], ...] = ()


CASES = {
    "chatml": Case("chatml"),
    "thinking": Case("think_strip", reply=THOUGHT + ANSWER),
    "not thinking": Case("think_strip"),
    "thinking off": Case("think_strip", fields=(("chat_template_kwargs", {"enable_thinking": False}),)),
    "default system": Case("default_system"),
    "own system": Case("default_system", before=(SYSTEM,)),
    "tools": Case("tools", fields=(("tools", [TOOL]),)),
    "tool call": Case(
        "tools", reply=CALL, echo=CALLED, then=("tool", "It was found, thank you."), fields=(("tools", [TOOL]),)
    ),
}


def history_tokens(place: Place, messages: list[Message], fields: dict[str, Any]) -> int:
    """Tokens of the prompt before its last message, counted without the server."""
    text = place.tokenizer.apply_chat_template(
        [_as_template_sees(message) for message in messages],
        tools=fields.get("tools"),
        tokenize=False,
        add_generation_prompt=True,
        **fields.get("chat_template_kwargs", {}),
    )
    end = text.rindex("<|im_start|>", 0, text.rindex(messages[-1]["content"]))
    return len(place.tokenizer.encode(text[:end], add_special_tokens=False))


def _as_template_sees(message: Message) -> Message:
    """Tool arguments travel as text and are rendered as an object."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("named", [False, True], ids=["stateless", "conversation_id"])
@pytest.mark.parametrize("name", CASES)
def test_reuse(checkpoint: Callable[..., Path], store: dict[str, Any], kind: str, name: str, named: bool) -> None:
    case = CASES[name]
    place = Place(checkpoint(kind, case.template), store)
    fields: dict[str, Any] = dict(case.fields)
    if named:
        fields["conversation_id"] = "a conversation"
    asked = [*case.before, user(QUESTION)]
    role, text = case.then
    then = {"role": role, "content": text, **({"tool_call_id": "call_1"} if role == "tool" else {})}
    with place.serve() as running:
        place.counted.say([*place.tokenizer.encode(case.reply, add_special_tokens=False), END])
        first = post(running, asked, **fields, max_tokens=200)
        said = first["choices"][0]
        assert (said["message"]["content"], said["finish_reason"]) == (case.reply, "stop")
        settle(running)
        messages = [*asked, case.echo or reply(first), then]
        check(place, running, messages, fields, "gpu")
    with place.serve() as running:
        check(place, running, messages, fields, "store")


def check(place: Place, running: Running, messages: list[Message], fields: dict[str, Any], tier: str) -> None:
    history = history_tokens(place, messages, fields)
    assert history > 60
    before = place.counted.rows
    second = post(running, messages, **fields, max_tokens=4, ignore_eos=True, auto_save=False)
    told, usage = second["engram"], second["usage"]
    assert told["restored_tokens"] >= 0.95 * history
    assert told["restored_tokens"] + told["prefilled_tokens"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == told["restored_tokens"]
    assert place.counted.rows - before == told["prefilled_tokens"] + 4 - 1
    assert (told["tier"], told["restore_failed"], told["turn_number"]) == (tier, False, 2)
