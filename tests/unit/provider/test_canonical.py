"""A turn keeps its digest however a client writes it back, and loses it when the conversation changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_litellm import digests
from engram_litellm.canonical import canonical, cleaned, echoed_conversation

HISTORY = [{"role": "system", "content": "S"}, {"role": "user", "content": "u1"}]

TEXT_TURNS = {
    "plain": {"role": "assistant", "content": "hello world"},
    "openai object with reasoning": {"content": "hello world", "role": "assistant", "reasoning_content": "hmm think"},
    "openai dump": {
        "content": "hello world",
        "refusal": None,
        "role": "assistant",
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "hmm",
    },
    "litellm dump": {
        "content": "hello world",
        "role": "assistant",
        "tool_calls": None,
        "function_call": None,
        "provider_specific_fields": {"engram": {"snapshot_id": "x"}},
    },
    "cache mark": {
        "content": [{"type": "text", "text": "hello world", "cache_control": {"type": "ephemeral"}}],
        "role": "assistant",
    },
    "thinking part and split text": {
        "content": [
            {"type": "thinking", "thinking": "t"},
            {"type": "text", "text": "hello "},
            {"type": "text", "text": "world"},
        ],
        "role": "assistant",
    },
    "output_text part": {"content": [{"type": "output_text", "text": "hello world"}], "role": "assistant"},
    "empty tool calls": {"content": "hello world", "role": "assistant", "tool_calls": []},
}


def tool_turn(content: object = None, arguments: object = '{"x": 1}', **extra: object) -> dict:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}, **extra}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


TOOL_TURNS = {
    "null content": tool_turn(None),
    "empty content": tool_turn(""),
    "no spaces": tool_turn(None, '{"x":1}'),
    "other spaces": tool_turn("", '{ "x" : 1 }'),
    "arguments as an object": tool_turn(None, {"x": 1}),
    "index of a stream": tool_turn(None, index=0),
    "no content key": {"role": "assistant", "tool_calls": tool_turn()["tool_calls"], "provider_specific_fields": {}},
}


def digest(messages: list[dict], **seed: object) -> bytes:
    start = digests.seed(str(seed.pop("owner", "k")), str(seed.pop("model", "m")), seed)
    return digests.chain(start, messages)[-1]


@pytest.mark.parametrize("name", TEXT_TURNS)
def test_a_text_turn_has_one_digest(name: str) -> None:
    assert digest([*HISTORY, TEXT_TURNS[name]]) == digest([*HISTORY, TEXT_TURNS["plain"]])


@pytest.mark.parametrize("name", TOOL_TURNS)
def test_a_tool_turn_has_one_digest(name: str) -> None:
    assert digest([*HISTORY, TOOL_TURNS[name]]) == digest([*HISTORY, TOOL_TURNS["null content"]])


def test_roles_that_mean_the_same_are_the_same() -> None:
    assert canonical({"role": "developer", "content": "S"}) == canonical({"role": "system", "content": "S"})
    result = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    assert canonical(result) == canonical({**result, "name": "f"})


@pytest.mark.parametrize(
    "changed",
    [
        [*HISTORY, {"role": "assistant", "content": "hello world "}],
        [*HISTORY, {"role": "assistant", "content": "Hello world"}],
        [*HISTORY, {"role": "user", "content": "hello world"}],
        [{"role": "system", "content": "S2"}, HISTORY[1], TEXT_TURNS["plain"]],
        [HISTORY[1], TEXT_TURNS["plain"]],
        [*HISTORY, tool_turn("hello world")],
        [*HISTORY, {"role": "assistant", "content": "hello world", "name": "bob"}],
        [*HISTORY, {"role": "tool", "content": "hello world", "tool_call_id": "a"}],
    ],
)
def test_another_conversation_has_another_digest(changed: list[dict]) -> None:
    assert digest(changed) != digest([*HISTORY, TEXT_TURNS["plain"]])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tool_turn(arguments='{"x": 1}'), tool_turn(arguments='{"x": 2}')),
        (tool_turn(arguments='{"x": "a b"}'), tool_turn(arguments='{"x": "ab"}')),
        (tool_turn(arguments='{"a":1,"b":2}'), tool_turn(arguments='{"b":2,"a":1}')),
        (tool_turn(arguments="not json"), tool_turn(arguments="not  json")),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a"}}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:b"}}]},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "u"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": "u"}, {"type": "text", "text": "a"}]},
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]},
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "y"}}]},
        ),
    ],
)
def test_what_the_model_sees_is_in_the_digest(one: dict, other: dict) -> None:
    assert canonical(one) != canonical(other)


def test_owner_model_tools_and_template_options_scope_the_digest() -> None:
    base = digest(HISTORY)
    assert digest(HISTORY, owner="k2") != base
    assert digest(HISTORY, model="m2") != base
    assert digest(HISTORY, tools=[{"type": "function", "function": {"name": "f"}}]) != base
    assert digest(HISTORY, chat_template_kwargs={"enable_thinking": False}) != base
    assert digest(HISTORY, tools=[]) == base
    assert digest(HISTORY, temperature=0.5) == base


def test_every_boundary_of_a_longer_history_is_found() -> None:
    start = digests.seed("k", "m", {})
    short = digests.chain(start, HISTORY)
    longer = digests.chain(start, [*HISTORY, TEXT_TURNS["plain"], {"role": "user", "content": "u2"}])
    assert longer[:2] == short
    assert len(set(longer)) == 4
    assert digests.extend(short[-1], TEXT_TURNS["openai dump"]) == longer[2]


def test_the_root_is_the_first_user_message() -> None:
    chain = digests.chain(digests.seed("k", "m", {}), [*HISTORY, TEXT_TURNS["plain"]])
    assert digests.root(chain, [*HISTORY, TEXT_TURNS["plain"]]) == chain[1]
    assert digests.root(chain[:1], HISTORY[:1]) == chain[0]


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text()), min_size=1, max_size=4))
def test_different_texts_never_collide(turns: list[tuple[str, str]]) -> None:
    """The encoding is injective: moving a character from one message to the next gives another digest."""
    messages = [{"role": role, "content": text} for role, text in turns]
    for index in range(len(messages) - 1):
        if messages[index]["content"]:
            moved = [dict(message) for message in messages]
            moved[index + 1]["content"] = moved[index]["content"][-1] + moved[index + 1]["content"]
            moved[index]["content"] = moved[index]["content"][:-1]
            assert digest(moved) != digest(messages)


def test_half_a_surrogate_pair_has_a_digest() -> None:
    assert canonical({"role": "user", "content": "\ud800"}) != canonical({"role": "user", "content": "?"})


def test_cleaned_messages_carry_only_request_fields() -> None:
    turn = tool_turn("", {"x": 1}, index=0)
    turn |= {"provider_specific_fields": {"engram": {}}, "refusal": None, "annotations": [], "thinking_blocks": []}
    assert cleaned(turn) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call_1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    assert cleaned({"role": "user", "content": None}) == {"role": "user", "content": None}
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert cleaned({"role": "user", "content": [part]})["content"] == [{"type": "text", "text": "a"}]
    assert part["cache_control"], "the caller's message is not changed"


@pytest.mark.parametrize("turn", [*TEXT_TURNS.values(), *TOOL_TURNS.values()])
def test_cleaning_keeps_the_digest(turn: dict) -> None:
    assert canonical(cleaned(turn)) == canonical(turn)
    json.dumps(cleaned(turn))


def test_the_newest_echoed_conversation_wins() -> None:
    def echo(name: object) -> dict:
        return {"role": "assistant", "content": "", "provider_specific_fields": {"engram": {"conversation_id": name}}}

    assert echoed_conversation([echo("old"), {"role": "user", "content": ""}, echo("new"), echo(None)]) == "new"
    assert echoed_conversation(HISTORY) is None
    assert echoed_conversation([{"role": "assistant", "engram": {"conversation_id": "c"}}]) == "c"
