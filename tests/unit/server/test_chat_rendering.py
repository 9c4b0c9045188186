"""Boundaries of real template behaviours: positions are those of the definition, computed here by whole encodes."""

from __future__ import annotations

import threading
from datetime import datetime

import pytest

from engram_runtime.server.chat import PROBES, Chat, ChatRenderer, canonical
from engram_runtime.server.encoding import IncrementalEncoder
from engram_runtime.server.errors import ApiError
from engram_runtime.server.positions import common_prefix
from engram_runtime.server.protocol.chat import Message
from tests.support import patience
from tests.support.tiny import make_tokenizer

NOON = datetime(2026, 3, 1, 12, 0)


def renderer(template, **options):
    errors = []
    made = ChatRenderer(
        make_tokenizer(template=template), max_model_len=100_000, on_boundary_error=errors.append, **options
    )
    return made, errors


def ids(template, messages, generation=True, **kwargs):
    tokenizer = make_tokenizer(template=template)
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation, strftime_now=NOON.strftime, **kwargs
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


HISTORY = [user("Hello there"), assistant("<think>\nhm\n</think>\n\nYes, maybe."), user("Who wrote the book?")]
TEMPLATES = ["chatml", "default_system", "think_strip", "date", "tools"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", [HISTORY[:1], HISTORY, [*HISTORY[:2], user("\n\nodd start")]])
def test_boundaries_are_common_prefixes(template, messages):
    made, errors = renderer(template)
    prompt = made.render(Chat(messages, date=NOON))
    whole = ids(template, messages)
    assert prompt.ids == whole
    assert prompt.boundaries["history"] == min(common_prefix(whole, ids(template, messages, False)), len(whole) - 1)
    probes = [ids(template, [*messages[:-1], user(probe)]) for probe in PROBES]
    shared = min(common_prefix(*probes), *(common_prefix(whole, probe) for probe in probes))
    assert prompt.boundaries["user_start"] == shared
    assert 0 < shared <= prompt.boundaries["history"] < len(whole)
    assert errors == []


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("reply", ["I do not know.", "<think>\nlet me see\n</think>\n\nAda did.", ""])
def test_next_history_begins_every_next_prompt(template, reply):
    """Whatever the user says next, the prompt begins with these ids, and no longer prefix is common to all."""
    made, errors = renderer(template)
    chat = Chat(HISTORY, date=NOON)
    prompt = made.render(chat)
    found = made.locate_next_history(chat, prompt, assistant(reply))
    assert found is not None
    for text in ("Thanks!", "What is 7 times 8?", "Zürich"):
        following = ids(template, [*HISTORY, assistant(reply), user(text)])
        assert following[: len(found)] == found
    first, second = (ids(template, [*HISTORY, assistant(reply), user(probe)]) for probe in PROBES)
    assert len(found) == common_prefix(first, second)
    # So the candidates of the next request name this position.
    following = made.render(Chat([*HISTORY, assistant(reply), user("Thanks!")], date=NOON))
    assert len(found) in following.candidates[:2]
    assert errors == []


def test_tool_calls_are_followed_by_tool_messages():
    made, _ = renderer("tools")
    chat = Chat([user("Weather?")])
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    found = made.locate_next_history(chat, made.render(chat), reply)
    following = ids("tools", [user("Weather?"), reply, {"role": "tool", "content": "12 degrees"}])
    assert found is not None
    assert following[: len(found)] == found
    assert make_tokenizer().decode(found).endswith("<tool_response>\n")


def test_templates_that_raise_lose_the_boundary_only():
    made, errors = renderer("raising")
    chat = Chat([user("Hello")])
    prompt = made.render(chat)
    assert set(prompt.boundaries) == {"user_start", "history"}
    assert made.locate_next_history(chat, prompt, assistant("Yes.")) is None
    assert errors == ["next_history"]


def test_continued_reply_ends_open_and_joins_what_follows():
    made, _ = renderer("chatml")
    messages = [user("Tell me"), assistant("Once upon")]
    chat = Chat(messages, continue_final=True, generation_prompt=False)
    prompt = made.render(chat)
    assert make_tokenizer().decode(prompt.ids).endswith("<|im_start|>assistant\nOnce upon")
    found = made.locate_next_history(chat, prompt, assistant(" a time."))
    assert found is not None
    assert make_tokenizer().decode(found).count("Once upon a time.<|im_end|>") == 1


def test_the_date_is_what_the_conversation_began_with():
    made, _ = renderer("date")
    assert made.prints_date
    assert not renderer("chatml")[0].prints_date
    first = made.render(Chat([user("Hello")], date=NOON))
    assert "01 March 2026" in make_tokenizer().decode(first.ids)
    later = made.render(Chat(HISTORY, date=NOON))
    assert common_prefix(first.ids, later.ids) >= first.boundaries["user_start"]


def test_tools_must_be_visible():
    tool = {"type": "function", "function": {"name": "weather"}}
    with pytest.raises(ApiError, match="tools cannot be shown"):
        renderer("chatml")[0].render(Chat([user("Hello")], tools=[tool]))
    assert "weather" in make_tokenizer().decode(renderer("tools")[0].render(Chat([user("Hello")], tools=[tool])).ids)


def test_developer_becomes_system_where_the_template_has_none():
    made, _ = renderer("chatml")
    plain = made.render(Chat([{"role": "system", "content": "Brief."}, user("Hello")]))
    assert made.render(Chat([{"role": "developer", "content": "Brief."}, user("Hello")])).ids == plain.ids


def test_template_arguments_reach_the_template():
    made, _ = renderer("think_strip")
    prompt = made.render(Chat([user("Hello")], template_kwargs={"enable_thinking": False}))
    assert prompt.ids == ids("think_strip", [user("Hello")], enable_thinking=False)
    # The empty thought belongs to the generation prompt: it is not part of the history.
    assert "<think>" not in make_tokenizer().decode(prompt.ids[: prompt.boundaries["history"]])


def test_two_hundred_messages_cost_little_more_than_one_encode():
    made, _ = renderer("chatml")
    messages = [
        (user if number % 2 == 0 else assistant)(f"{number} " + "the memory of a conversation " * 33)
        for number in range(200)
    ]
    messages.append(user("And now?"))
    chat = Chat(messages)
    encodes: list[int] = []
    whole = made._encode

    def counting(text):
        encodes.append(len(text))
        return whole(text)

    made._encode = counting
    made._encoder = IncrementalEncoder(counting, made._separators)
    prompt = made.render(chat)
    made.locate_next_history(chat, prompt, assistant("Yes."))
    assert encodes[0] > 180_000
    assert sum(encodes[1:]) < 5_000
    assert len(prompt.candidates) == 16


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "a\nb"}),
        ({"content": None, "tool_calls": None, "refusal": None}, None),
        ({"content": "x", "annotations": [], "provider_specific_fields": {"a": 1}}, {"content": "x"}),
        ({"content": "x", "reasoning": "hm"}, {"content": "x", "reasoning_content": "hm"}),
    ],
)
def test_canonical_spelling(fields, expected):
    if expected is None:
        with pytest.raises(ValueError, match="needs content"):
            Message.model_validate({"role": "assistant", **fields})
        return
    message = Message.model_validate({"role": "assistant", **fields})
    assert canonical(message) == {"role": "assistant", **expected}


def test_tool_arguments_are_spelled_one_way():
    def call(arguments):
        tool_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return canonical(Message.model_validate({"role": "assistant", "tool_calls": [tool_call]}))

    assert call('{"x":1}') == call('{ "x": 1 }')
    assert call("not json")["tool_calls"][0]["function"]["arguments"] == "not json"


async def test_a_render_that_takes_too_long_is_refused():
    made, _ = renderer("chatml", timeout_seconds=0.05)
    refused = threading.Event()
    made.render = lambda chat: refused.wait(patience.SECONDS)  # type: ignore[assignment]
    try:
        with pytest.raises(ApiError) as caught:
            await made.prompt(Chat([user("Hello")]))
    finally:
        refused.set()
    assert (caught.value.status, caught.value.code) == (503, "render_timeout")
