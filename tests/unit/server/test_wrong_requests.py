"""Each field wrong in every way: a 4xx that names the field, never a 5xx, never something silently dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.server.conftest import Api

HUGE = 10**30
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def shared():
    return Api()


@pytest.fixture
def api(shared):
    """One application for the whole table: a request that is refused leaves nothing behind."""
    shared.engine.requests.clear()
    return shared


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


# Values of every JSON type; each field names those that are right for it. null is always as if absent.
WRONG: dict[str, Any] = {
    "string": "nonsense",
    "empty string": "",
    "number": 1.5,
    "negative": -3,
    "huge": HUGE,
    "true": True,
    "false": False,
    "list": [1, "x"],
    "empty list": [],
    "object": {"a": 1},
    "empty object": {},
    "nested": deep(50),
}
SAMPLING_FIELDS: dict[str, set[str]] = {
    "model": set(),
    "temperature": {"number"},
    "top_p": set(),
    "top_k": set(),
    "min_p": set(),
    "n": set(),
    "seed": {"negative"},
    "stop": {"string", "empty list"},
    "stop_token_ids": {"empty list"},
    "min_tokens": set(),
    "ignore_eos": {"true", "false"},
    "include_stop_str_in_output": {"true", "false"},
    "skip_special_tokens": {"true", "false"},
    "presence_penalty": {"number"},
    "frequency_penalty": {"number"},
    "repetition_penalty": {"number"},
    "logit_bias": {"empty object"},
    "prompt_logprobs": set(),
    "stream": {"true", "false"},
    "user": {"string", "empty string"},
    "conversation_id": {"string"},
    "branch_name": {"string"},
    "restore_from": set(),
    "auto_save": {"true", "false"},
    "stateful_mode": set(),
    "delta": {"true", "false"},  # true needs a conversation_id: below
}
REFUSED = (
    "audio",
    "best_of",
    "chat_template",
    "documents",
    "echo",
    "function_call",
    "prediction",
    "prompt_cache_retention",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
)
CHAT_FIELDS = {
    **SAMPLING_FIELDS,
    "messages": set(),
    "max_tokens": set(),
    "max_completion_tokens": set(),
    "logprobs": {"true", "false"},
    "top_logprobs": set(),
    "tools": {"empty list"},
    "tool_choice": set(),
    "parallel_tool_calls": {"true"},
    "add_generation_prompt": {"true", "false"},
    "continue_final_message": {"false"},
    "chat_template_kwargs": {"object", "empty object"},
    "response_format": set(),
    "modalities": set(),
    "service_tier": set(),
    "store": {"false"},
    "metadata": {"empty object"},
    "prompt_cache_key": {"string", "empty string"},
    "safety_identifier": {"string", "empty string"},
    "functions": {"empty list"},
    "stream_options": set(),
    "surprise": set(),
    **{name: set() for name in REFUSED},
}
TEXT_FIELDS = {
    **SAMPLING_FIELDS,
    "prompt": {"string"},
    "max_tokens": set(),
    "logprobs": set(),
    "best_of": set(),
    "echo": {"true", "false"},
    "suffix": set(),
    "stream_options": set(),
    "messages": set(),
    "tools": set(),
}


def cases(fields: dict[str, set[str]]) -> list[tuple[str, str]]:
    return [(name, kind) for name, right in fields.items() for kind in WRONG if kind not in right]


def assert_refused(answer: Any, name: str) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"] or "").split("[")[0].split(".")[0] == name, error
    assert name in error["message"], error


@pytest.mark.parametrize(("name", "kind"), cases(CHAT_FIELDS))
async def test_chat_field(api, name, kind):
    body = {"model": "tiny", "messages": USER, name: WRONG[kind]}
    assert_refused(await api.http.post("/v1/chat/completions", json=body), name)
    assert api.engine.requests == []


@pytest.mark.parametrize(("name", "kind"), cases(TEXT_FIELDS))
async def test_completion_field(api, name, kind):
    body = {"model": "tiny", "prompt": "Hello", name: WRONG[kind]}
    assert_refused(await api.http.post("/v1/completions", json=body), name)
    assert api.engine.requests == []


def said(**fields: Any) -> list[Any]:
    return [{"role": "user", "content": "x", **fields}]


def after_user(**fields: Any) -> list[Any]:
    return [*USER, fields]


IMAGE = {"type": "image_url", "image_url": {"url": "u"}}
MESSAGES: dict[str, tuple[str, Any]] = {
    "not an object": ("messages[0]", ["hello"]),
    "no role": ("messages[0].role", [{"content": "x"}]),
    "unknown role": ("messages[0].role", said(role="robot")),
    "function role": ("messages[0].role", said(role="function", name="f")),
    "user without content": ("messages[0]", [{"role": "user"}]),
    "user with null content": ("messages[0]", said(content=None)),
    "tool without content": ("messages[1]", after_user(role="tool", tool_call_id="1")),
    "assistant with nothing": ("messages[1]", [*USER, {"role": "assistant"}, *USER]),
    "content number": ("messages[0].content", said(content=5)),
    "content object": ("messages[0].content", said(content={"text": "x"})),
    "content empty list": ("messages[0]", said(content=[])),
    "part not an object": ("messages[0].content[0]", said(content=["x"])),
    "part without type": ("messages[0].content[0].type", said(content=[{"text": "x"}])),
    "part without text": ("messages[0].content[0].text", said(content=[{"type": "text"}])),
    "part with number": ("messages[0].content[0].text", said(content=[{"type": "text", "text": 1}])),
    "image": ("messages[0].content[1]", said(content=[{"type": "text", "text": "x"}, IMAGE])),
    "audio": ("messages[0].content[0]", said(content=[{"type": "input_audio", "input_audio": {}}])),
    "unknown field": ("messages[0].mood", said(mood="good")),
    "calls on a user message": ("messages[0]", said(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])),
    "call without a name": (
        "messages[1].tool_calls[0].function.name",
        after_user(role="assistant", tool_calls=[{"function": {"arguments": "{}"}}]),
    ),
    "call with object arguments": (
        "messages[1].tool_calls[0].function.arguments",
        after_user(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}]),
    ),
    "custom tool call": (
        "messages[1].tool_calls[0].type",
        after_user(role="assistant", tool_calls=[{"type": "custom", "function": {"name": "f", "arguments": ""}}]),
    ),
    "refusal": ("messages[1].refusal", after_user(role="assistant", content="", refusal="no")),
    "old function call": ("messages[1].function_call", after_user(role="assistant", content="x", function_call={})),
    "name too long": ("messages[0].name", said(name="n" * 300)),
}


@pytest.mark.parametrize(("param", "messages"), MESSAGES.values(), ids=MESSAGES.keys())
async def test_message(api, param, messages):
    answer = await api.chat(messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"].startswith(param)


FUNCTION = {"type": "function", "function": {"name": "f"}}
CONTINUED = [*USER, {"role": "assistant", "content": "x"}]
TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "top_logprobs without logprobs": ("top_logprobs", {"top_logprobs": 2}),
    "two different limits": ("max_tokens", {"max_tokens": 3, "max_completion_tokens": 4}),
    "min above max": ("min_tokens", {"max_tokens": 3, "min_tokens": 4}),
    "usage without a stream": ("stream_options", {"stream_options": {"include_usage": True}}),
    "usage number": ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    "stream_options unknown": ("stream_options.x", {"stream": True, "stream_options": {"x": 1}}),
    "obfuscation": (
        "stream_options.include_obfuscation",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
    ),
    "prompt_logprobs streamed": ("prompt_logprobs", {"stream": True, "prompt_logprobs": 1}),
    "continue after a user message": ("continue_final_message", {"continue_final_message": True}),
    "continue and generation prompt": (
        "continue_final_message",
        {"continue_final_message": True, "add_generation_prompt": True, "messages": CONTINUED},
    ),
    "tool_choice required": ("tool_choice", {"tools": [FUNCTION], "tool_choice": "required"}),
    "tool_choice named": ("tool_choice", {"tools": [FUNCTION], "tool_choice": FUNCTION}),
    "strict tool": (
        "tools[0].function.strict",
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    ),
    "tool without a name": ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    "custom tool": ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    "serial tool calls": ("parallel_tool_calls", {"tools": [FUNCTION], "parallel_tool_calls": False}),
    "json mode": ("response_format", {"response_format": {"type": "json_object"}}),
    "audio output": ("modalities", {"modalities": ["text", "audio"]}),
    "flex": ("service_tier", {"service_tier": "flex"}),
    "stored": ("store", {"store": True}),
    "functions": ("functions", {"functions": [{"name": "f"}]}),
    "metadata numbers": ("metadata.a", {"metadata": {"a": 1}}),
    "template argument reserved": ("chat_template_kwargs", {"chat_template_kwargs": {"messages": "x"}}),
    "template argument private": ("chat_template_kwargs", {"chat_template_kwargs": {"__class__": "x"}}),
    "template argument nested": ("chat_template_kwargs", {"chat_template_kwargs": {"a": {"b": 1}}}),
    "logit_bias word": ("logit_bias", {"logit_bias": {"hello": 1}}),
    "logit_bias too large": ("logit_bias", {"logit_bias": {"5": 101}}),
    "logit_bias beyond the vocabulary": ("logit_bias", {"logit_bias": {"9999999": 1}}),
    "stop_token_ids beyond the vocabulary": ("stop_token_ids", {"stop_token_ids": [9999999]}),
    "too many stops": ("stop", {"stop": ["x"] * 17}),
    "stop with an empty string": ("stop", {"stop": ["a", ""]}),
    "stop number": ("stop", {"stop": ["a", 5]}),
    "window": ("max_tokens", {"max_tokens": 5000}),
    "delta alone": ("conversation_id", {"delta": True}),
    "delta and restore_from": ("delta", {"delta": True, "conversation_id": "c", "restore_from": "c:1"}),
    "stateless restore": ("stateful_mode", {"stateful_mode": "stateless", "restore_from": "c:1"}),
    "stateless save": ("stateful_mode", {"stateful_mode": "stateless", "auto_save": True}),
    "selector without a turn": ("restore_from", {"restore_from": "conversation"}),
    "selector with a word": ("restore_from", {"restore_from": "conversation:last"}),
    "selector negative": ("restore_from", {"restore_from": "conversation:-1"}),
    "selector path": ("restore_from", {"restore_from": "../../etc/passwd"}),
    "branch path": ("branch_name", {"branch_name": "../x"}),
    "conversation with a line break": ("conversation_id", {"conversation_id": "a\nb"}),
    "conversation too long": ("conversation_id", {"conversation_id": "a" * 300}),
}


@pytest.mark.parametrize(("param", "fields"), TOGETHER.values(), ids=TOGETHER.keys())
async def test_fields_together(api, param, fields):
    answer = await api.chat(**fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param.split("[")[0].split(".")[0] in answer.json()["error"]["message"]
    assert api.engine.requests == []


TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "no prompt": ("prompt", {"prompt": None}),
    "empty prompt": ("prompt", {"prompt": ""}),
    "empty token list": ("prompt", {"prompt": [[]]}),
    "mixed ids and text": ("prompt", {"prompt": [1, "x"]}),
    "negative id": ("prompt", {"prompt": [-1]}),
    "unknown id": ("prompt", {"prompt": [10**9]}),
    "too many prompts": ("prompt", {"prompt": ["x"] * 300}),
    "too many sequences": ("prompt", {"prompt": ["x"] * 100, "n": 20}),
    "max_tokens 0": ("max_tokens", {"max_tokens": 0}),
    "best_of below n": ("best_of", {"n": 3, "best_of": 2}),
    "best_of streamed": ("best_of", {"best_of": 2, "stream": True}),
    "echo with logprobs streamed": ("echo", {"echo": True, "logprobs": 1, "stream": True}),
    "suffix": ("suffix", {"suffix": "end"}),
    "window": ("max_tokens", {"max_tokens": 5000}),
    "several prompts restored": ("prompt", {"prompt": ["a", "b"], "restore_from": "c:1"}),
}


@pytest.mark.parametrize(("param", "fields"), TEXT.values(), ids=TEXT.keys())
async def test_completion_fields(api, param, fields):
    answer = await api.complete(**fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]
    assert api.engine.requests == []


START = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], '
BODIES = {
    "empty": b"",
    "not json": b"{",
    "a list": b"[1]",
    "a string": b'"x"',
    "null": b"null",
    "not a number": START + b'"temperature": NaN}',
    "infinite": START + b'"temperature": Infinity}',
    "half a surrogate pair": rb'{"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}',
    "surrogate in a tool": START
    + rb'"tools": [{"type": "function", "function": {"name": "f", "description": "\uD83d"}}]}',
    "surrogate as a key": START + rb'"\udfff": 1}',
    "bad utf-8": b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
    "very deep": b'{"model": "tiny", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long number": START + b'"seed": ' + b"9" * 10_000 + b"}",
}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/snapshots"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_body(api, path, body):
    answer = await api.http.post(path, content=body, headers=JSON)
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["message"]


async def test_deep_schema_is_no_crash(api):
    schema = b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}"
    tools = b'"tools": [{"type": "function", "function": {"name": "f", "parameters": ' + schema + b"}}]}"
    answer = await api.http.post("/v1/chat/completions", content=START + tools, headers=JSON)
    assert answer.status_code in (200, 400)


async def test_escaped_text_is_not_mistaken_for_a_surrogate(api):
    """An escaped backslash before "ud800", and a whole pair."""
    text = rb"\\ud800 \ud83d\ude00"
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "' + text + b'"}]}'
    answer = await api.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 200, answer.text


async def test_other_content_types_are_refused(api):
    answer = await api.http.post("/v1/chat/completions", data={"model": "tiny"})
    assert answer.status_code in (400, 415)


async def test_unknown_model_and_paths(api):
    answer = await api.chat(model="gpt-4o")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    for path in ("/v1/nothing", "/", "/v1/responses", "/v1/messages", "/v1/responses/x/y"):
        answer = await api.http.post(path, json={})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        assert path in answer.json()["error"]["message"]
    refused = await api.http.get("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert (await api.http.put(f"/v1/snapshots/{'0' * 32}")).headers["allow"] == "DELETE, GET"


async def test_tools_need_a_template_that_shows_them(make_api):
    answer = await make_api("chatml").chat(tools=[FUNCTION])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_template_that_refuses(make_api):
    answer = await make_api("raising").chat(messages=[*CONTINUED, *USER])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "assistant turns are not allowed here" in answer.json()["error"]["message"]


async def test_prompt_that_cannot_fit(api):
    for content in ("word " * 5000, "x" * 3_000_000):
        answer = await api.chat(content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert answer.json()["error"]["param"] == "messages"
        answer = await api.complete(content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert answer.json()["error"]["param"] == "prompt"


async def test_floods_are_refused_quickly(api):
    """Millions of tiny things inside the size limit: refused by count, not validated one by one."""
    flood: dict[str, tuple[str, dict[str, Any]]] = {
        "messages": ("/v1/chat/completions", {"messages": USER * 200_000}),
        "content": ("/v1/chat/completions", {"messages": said(content=[{"type": "text", "text": ""}] * 200_000)}),
        "logit_bias": (
            "/v1/chat/completions",
            {"messages": USER, "logit_bias": {str(n): 1 for n in range(200_000)}},
        ),
        "prompt": ("/v1/completions", {"prompt": [1] * 1_200_000}),
        "tokens": ("/detokenize", {"tokens": [1] * 1_200_000}),
    }
    for path, fields in flood.values():
        content = json.dumps({"model": "tiny", **fields})
        answer = await api.http.post(path, content=content, headers=JSON)
        assert answer.status_code == 400
        assert "at most" in answer.json()["error"]["message"]


async def test_headers_are_checked(api):
    for name, value in (("auto-save", "perhaps"), ("delta", "1"), ("stateful-mode", "x")):
        answer = await api.chat(headers={f"x-engram-{name}": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"x-engram-{name}")
    answer = await api.chat(headers={"x-engram-branch-name": "../x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "branch_name")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
field_names = st.sampled_from(sorted({*CHAT_FIELDS, *TEXT_FIELDS, "tokens", "return_token_strs", "turn_number", "ttl"}))
message_values = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"]), "content": st.text(max_size=20)},
        optional={"tool_calls": json_values, "name": json_values, "reasoning_content": json_values},
    ),
    max_size=4,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/snapshots"]),
    st.dictionaries(field_names, json_values, max_size=4),
    message_values | json_values,
    st.text(max_size=20) | json_values,
)
async def test_no_body_breaks_the_server(api, path, fields, messages, prompt):
    body = {"model": "tiny", **({"messages": messages} if "chat" in path else {"prompt": prompt}), **fields}
    answer = await api.http.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
