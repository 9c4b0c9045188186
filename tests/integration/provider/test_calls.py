"""Plain calls through real LiteLLM, in all four styles: content, usage, metadata, parameters, the conversation."""

from __future__ import annotations

import copy
import logging
from typing import Any

import litellm
import pytest

from tests.integration.provider.styles import HI, STYLES, TOOLS, ask, failure
from tests.support.fake_openai import FakeEngine

pytestmark = pytest.mark.parametrize("style", STYLES)


def test_content_reasoning_and_finish(style: str, engine: FakeEngine) -> None:
    out = ask(style, api_base=engine.url)
    assert out.text == "hello world"
    assert out.message.reasoning_content == "hmm think"
    assert out.finish == "stop"
    assert out.id.startswith("chatcmpl-")
    if out.chunks:
        assert len({chunk.id for chunk in out.chunks}) == 1
        assert [chunk.choices[0].finish_reason for chunk in out.chunks].count("stop") == 1
        assert out.chunks[-1].choices[0].finish_reason == "stop"


def test_usage_is_the_servers(style: str, engine: FakeEngine) -> None:
    first = ask(style, api_base=engine.url)
    second = ask(style, [*HI, {"role": "assistant", "content": first.text}, *HI], api_base=engine.url)
    assert (second.usage.prompt_tokens, second.usage.completion_tokens, second.usage.total_tokens) == (30, 7, 37)
    assert second.usage.prompt_tokens_details.cached_tokens == 20


def test_metadata_is_on_the_message(style: str, engine: FakeEngine) -> None:
    first = ask(style, api_base=engine.url).engram
    assert first["turn_number"] == 1
    assert first["restored_tokens"] == first["tokens_saved"] == 0
    assert first["restore_failed"] is False
    assert first["auto_save"] is True
    second = ask(style, [*HI, {"role": "assistant", "content": "hello world"}, *HI], api_base=engine.url).engram
    assert second["conversation_id"] == first["conversation_id"]
    assert second["tokens_saved"] == 20
    assert (second["tier"], second["restore_time_ms"], second["turn_number"]) == ("host", 1.5, 2)
    assert second["snapshot_id"] not in (None, first["snapshot_id"])


def test_tool_calls(style: str, engine: FakeEngine) -> None:
    out = ask(style, tools=TOOLS, tool_choice="auto", api_base=engine.url)
    calls = [(call.id, call.function.name, call.function.arguments) for call in out.message.tool_calls]
    assert calls == [("call_0", "f", '{"x": 0}'), ("call_1", "f", '{"x": 1}')]
    assert out.finish == "tool_calls"
    assert engine.chats()[0]["tools"] == TOOLS
    assert engine.chats()[0]["tool_choice"] == "auto"


def test_a_tool_conversation_keeps_its_id(style: str, engine: FakeEngine) -> None:
    out = ask(style, tools=TOOLS, api_base=engine.url)
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": str(i)} for i in range(2)]
    rendered = {"role": "assistant", "content": "", "tool_calls": copy.deepcopy(out.message.model_dump()["tool_calls"])}
    for call in rendered["tool_calls"]:
        call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
    ask(style, [*HI, rendered, *results], tools=TOOLS, api_base=engine.url)
    assert engine.chats()[1]["conversation_id"] == out.engram["conversation_id"]


def test_parameters_pass_through(style: str, engine: FakeEngine) -> None:
    ask(
        style,
        api_base=engine.url,
        temperature=0.25,
        max_completion_tokens=9,
        top_p=0.5,
        seed=7,
        stop=["x"],
        logit_bias={"5": 1},
        response_format={"type": "json_object"},
        top_k=4,
        extra_body={"min_p": 0.125, "chat_template_kwargs": {"enable_thinking": False}},
        extra_headers={"x-trace": "t1"},
    )
    body = engine.chats()[0]
    expected = {
        "model": "m",
        "messages": HI,
        "temperature": 0.25,
        "max_tokens": 9,
        "top_p": 0.5,
        "seed": 7,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "response_format": {"type": "json_object"},
        "top_k": 4,
        "min_p": 0.125,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    if "stream" in style:
        expected |= {"stream": True, "stream_options": {"include_usage": True}}
    assert body == expected
    assert engine.requests[0].headers["x-trace"] == "t1"


def test_the_key_is_sent(style: str) -> None:
    with FakeEngine(key="secret") as engine:
        assert ask(style, api_base=engine.url, api_key="secret").text == "hello world"
        error = failure(lambda: ask(style, api_base=engine.url, api_key="wrong"))
    assert isinstance(error, litellm.AuthenticationError)


def test_the_key_of_the_environment(style: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_API_KEY", "from-env")
    monkeypatch.setenv("ENGRAM_API_BASE", f"{engine.url}/v1")
    ask(style)
    assert engine.requests[0].headers["authorization"] == "Bearer from-env"


@pytest.mark.parametrize(
    "rendered",
    [
        {"role": "assistant", "content": "hello world", "refusal": None, "tool_calls": None, "audio": None},
        {"role": "assistant", "content": [{"type": "text", "text": "hello world"}]},
        {"role": "assistant", "content": "hello world", "reasoning_content": "hmm think"},
        {"content": "hello world", "role": "assistant", "function_call": None, "annotations": []},
    ],
)
def test_rewritten_histories_keep_their_conversation(style: str, engine: FakeEngine, rendered: dict[str, Any]) -> None:
    first = ask(style, api_base=engine.url).engram
    second = ask(style, [*HI, rendered, *HI], api_base=engine.url)
    assert engine.chats()[1]["conversation_id"] == first["conversation_id"]
    assert second.engram["tokens_saved"] == 20


def test_an_earlier_boundary_is_matched_too(style: str, engine: FakeEngine) -> None:
    """Edit and regenerate: the history ends in the middle of what was recorded, and goes on otherwise."""
    messages: list[dict[str, Any]] = list(HI)
    for _ in range(3):
        out = ask(style, messages, api_base=engine.url)
        messages = [*messages, {"role": "assistant", "content": out.text}, {"role": "user", "content": "go on"}]
    edited = [*messages[:4], {"role": "user", "content": "something else"}]
    assert ask(style, edited, api_base=engine.url).engram["conversation_id"] == out.engram["conversation_id"]
    assert engine.chats()[-1]["conversation_id"] == out.engram["conversation_id"]


def test_new_conversations_leave_the_id_to_the_server(style: str, engine: FakeEngine) -> None:
    ask(style, api_base=engine.url)
    ask(style, [{"role": "user", "content": "another"}], api_base=engine.url)
    assert all("conversation_id" not in body for body in engine.chats())


def test_another_key_sees_no_conversation_of_the_first(style: str, engine: FakeEngine) -> None:
    ask(style, api_base=engine.url, api_key="a")
    ask(style, [*HI, {"role": "assistant", "content": "hello world"}, *HI], api_base=engine.url, api_key="b")
    assert "conversation_id" not in engine.chats()[1]


@pytest.mark.parametrize(
    ("kwargs", "sent"),
    [
        (
            {"extra_body": {"conversation_id": "mine", "branch_name": "b"}},
            {"conversation_id": "mine", "branch_name": "b"},
        ),
        ({"conversation_id": "mine"}, {"conversation_id": "mine"}),
        ({"litellm_session_id": "s1"}, {"conversation_id": "s1"}),
        ({"metadata": {"session_id": "s2"}}, {"conversation_id": "s2"}),
        ({"litellm_session_id": "s1", "extra_body": {"conversation_id": "mine"}}, {"conversation_id": "mine"}),
        ({"extra_body": {"auto_save": False}}, {"auto_save": False}),
        ({"extra_body": {"stateful_mode": "stateless"}}, {"stateful_mode": "stateless"}),
        ({"extra_body": {"stateful_mode": "auto"}}, {"stateful_mode": "auto"}),
    ],
)
def test_conversation_fields(style: str, engine: FakeEngine, kwargs: dict[str, Any], sent: dict[str, Any]) -> None:
    ask(style, api_base=engine.url, **kwargs)
    names = ("conversation_id", "branch_name", "auto_save", "stateful_mode", "restore_from", "delta")
    assert {name: value for name, value in engine.chats()[0].items() if name in names} == sent


def test_modes_of_the_environment(style: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_STATEFUL_MODE", "stateless")
    history = [*HI, {"role": "assistant", "content": "hello world"}, *HI]
    for messages in (HI, history):
        out = ask(style, messages, api_base=engine.url, litellm_session_id="s")
        assert engine.chats()[-1]["stateful_mode"] == "stateless"
        assert "conversation_id" not in engine.chats()[-1]
        assert out.engram["tokens_saved"] == 0
    monkeypatch.setenv("ENGRAM_STATEFUL_MODE", "explicit")
    monkeypatch.setenv("ENGRAM_AUTO_SAVE", "false")
    ask(style, history, api_base=engine.url)
    assert engine.chats()[-1]["stateful_mode"] == "explicit"
    assert engine.chats()[-1]["auto_save"] is False


def test_restore_from_sends_only_what_was_given(style: str, engine: FakeEngine) -> None:
    first = ask(style, api_base=engine.url, extra_body={"conversation_id": "c"})
    new = [{"role": "user", "content": "what did I say?"}]
    for selector in ("c:1", first.engram["snapshot_id"]):
        out = ask(style, new, api_base=engine.url, extra_body={"restore_from": selector})
        assert engine.chats()[-1]["messages"] == new
        assert engine.chats()[-1]["restore_from"] == selector
        assert out.engram["restored_tokens"] == 20
        assert out.usage.prompt_tokens == 30


def test_a_restore_that_cannot_be_is_a_warning(
    style: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="engram_litellm"):
        out = ask(style, api_base=engine.url, extra_body={"restore_from": "nobody:3"})
    assert out.text == "hello world"
    assert out.engram["restore_failed"] is True
    assert "no such snapshot" in out.engram["restore_error"]
    assert [("restore_from" in body) for body in engine.chats()] == [True, False]
    assert "was not restored" in caplog.text


def test_a_restore_that_failed_in_the_server_is_told(
    style: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.restore_error = "checksum of kv.3 differs"
    with caplog.at_level(logging.WARNING, logger="engram_litellm"):
        out = ask(style, api_base=engine.url)
    assert out.engram["restore_failed"] is True
    assert out.engram["restore_error"] == "checksum of kv.3 differs"
    assert "checksum of kv.3 differs" in caplog.text


def test_the_new_messages_only_where_the_server_takes_them(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_DELTA_MIN_BYTES", "100")
    long = [{"role": "user", "content": "x" * 200}]
    with FakeEngine(features="delta") as engine:
        first = ask(style, long, api_base=engine.url)
        history = [*long, {"role": "assistant", "content": first.text}, *HI]
        second = ask(style, history, api_base=engine.url)
        body = engine.chats()[-1]
        assert body["messages"] == HI
        assert body["restore_from"] == first.engram["snapshot_id"]
        assert second.usage.prompt_tokens == 30
        engine.turns.clear()  # the server lost everything: one resend in full, and nobody need know
        third = ask(style, [*history, {"role": "assistant", "content": second.text}, *HI], api_base=engine.url)
        assert [len(body["messages"]) for body in engine.chats()[2:]] == [1, 5]
        assert "restore_from" not in engine.chats()[-1]
        assert third.engram["restore_failed"] is False
        count = len(engine.chats())
        ask(style, HI, api_base=engine.url)
        assert len(engine.chats()) == count + 1


def test_a_plain_openai_server_is_enough(style: str) -> None:
    with FakeEngine(metadata=False) as engine:
        out = ask(style, api_base=engine.url)
        assert out.text == "hello world"
        assert out.engram["restore_failed"] is False
        assert set(engine.chats()[0]) <= {"model", "messages", "stream", "stream_options"}


def test_unescaped_line_separators_arrive_whole(style: str, engine: FakeEngine) -> None:
    engine.replies["m"] = "a\u2028b\u0085c\u2029d"
    assert ask(style, api_base=engine.url).text == "a\u2028b\u0085c\u2029d"
