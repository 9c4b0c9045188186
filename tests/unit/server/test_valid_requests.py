"""Valid requests of every kind answer 200 with the right content: the table is the list of what the API takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engram_runtime.server.protocol.responses import ChatCompletion, Completion
from tests.support.tiny import make_tokenizer

REPLY = "Your prompt had {} tokens. Thank you, Zürich says yes."
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Now", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}


def user(text: Any = "Hello there") -> dict[str, Any]:
    return {"role": "user", "content": text}


CHAT: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, user()]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, user()]},
    "two turns": {"messages": [user(), {"role": "assistant", "content": "Yes."}, user("And?")]},
    "text parts": {"messages": [user([{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}])]},
    "part with cache_control": {
        "messages": [user([{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}])]
    },
    "named user": {"messages": [{**user(), "name": "ada"}]},
    "empty content": {"messages": [user("")]},
    "unicode": {"messages": [user("Grüezi 👋🏽 日本語 \u0000")]},
    "special tokens as text": {"messages": [user("<|im_end|> is a token")]},
    "assistant echoed as sdk object": {
        "messages": [
            user(),
            {
                "role": "assistant",
                "content": "Yes.",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": None,
                "reasoning_content": "hm",
                "provider_specific_fields": {"engram": {"turn_number": 1}},
            },
            user("And?"),
        ]
    },
    "assistant without content but a call": {
        "messages": [
            user(),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        ],
        "tools": TOOLS,
    },
    "tool result with name and parts": {
        "messages": [
            user(),
            {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]},
            {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": [{"type": "text", "text": "12"}]},
            user("thanks"),
        ],
    },
    "empty tool_calls": {"messages": [user(), {"role": "assistant", "content": "Yes.", "tool_calls": []}, user()]},
    "tools": {"tools": TOOLS},
    "tools with choice auto": {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
    "tools hidden": {"tools": TOOLS, "tool_choice": "none"},
    "empty tools": {"tools": []},
    "nulls": {
        "tools": None,
        "temperature": None,
        "stop": None,
        "seed": None,
        "n": None,
        "logit_bias": None,
        "response_format": None,
        "reasoning_effort": None,
        "stream": None,
        "stream_options": None,
        "user": None,
    },
    "greedy": {"temperature": 0},
    "temperature integer": {"temperature": 2},
    "top_p": {"top_p": 0.1},
    "top_k": {"top_k": 5},
    "top_k off": {"top_k": -1},
    "min_p": {"min_p": 0.5},
    "penalties": {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {"5": -100, "6": 3.5}},
    "max_tokens": {"max_tokens": 3},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "both limits": {"max_completion_tokens": 3, "max_tokens": 3},
    "min_tokens": {"min_tokens": 2, "max_tokens": 8},
    "stop string": {"stop": "had"},
    "stop strings": {"stop": ["nowhere", "tokens", "Thank"]},
    "stop included": {"stop": ["had"], "include_stop_str_in_output": True},
    "no stop": {"stop": []},
    "stop_token_ids": {"stop_token_ids": [3]},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 4},
    "special tokens shown": {"skip_special_tokens": False, "max_tokens": 4},
    "n": {"n": 3},
    "seed": {"seed": 7},
    "negative seed": {"seed": -7, "temperature": 0},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 4},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "accepted and meaningless": {
        "user": "ada",
        "metadata": {"trace": "1"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "functions": [],
    },
    "continue_final_message": {
        "messages": [user(), {"role": "assistant", "content": "Once upon"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "no generation prompt": {"add_generation_prompt": False},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False, "depth": 2, "mode": "x"}},
    "conversation": {"conversation_id": "a: strange, but printable/../id"},
    "branch": {"conversation_id": "c", "branch_name": "what-if"},
    "stateless": {"stateful_mode": "stateless"},
    "explicit": {"stateful_mode": "explicit"},
    "explicit save": {"stateful_mode": "explicit", "auto_save": True},
    "no save": {"auto_save": False},
    "headers": {"headers": {"x-engram-conversation-id": "h", "x-engram-auto-save": "false", "x-request-id": "r.1"}},
    "delta false": {"delta": False},
}


@pytest.mark.parametrize("fields", CHAT.values(), ids=CHAT.keys())
async def test_chat(api, fields):
    answer = await api.chat(**fields)
    assert answer.status_code == 200, answer.text
    body = ChatCompletion.model_validate(answer.json())
    ids, params, _ = api.engine.requests[0]
    assert body.usage.prompt_tokens == len(ids)
    assert body.usage.total_tokens == len(ids) + body.usage.completion_tokens
    assert [choice.index for choice in body.choices] == list(range(params.n))
    whole = api.engine.reply_to(len(ids), 0, params)
    content = body.choices[0].message.content
    assert whole.startswith(content)
    limit = fields.get("max_tokens") or fields.get("max_completion_tokens")
    if limit:
        assert body.usage.completion_tokens == limit
        assert body.choices[0].finish_reason == "length"
    elif fields.get("stop"):
        assert body.choices[0].finish_reason == "stop"
        assert body.choices[0].stop_reason in fields["stop"]
    else:
        assert content == whole
        assert body.choices[0].finish_reason == "stop"


STREAMED = {name: fields for name, fields in CHAT.items() if "prompt_logprobs" not in fields}


@pytest.mark.parametrize("fields", STREAMED.values(), ids=STREAMED.keys())
async def test_chat_streamed_equals_plain(api, fields):
    """The same request as a stream gives the same text, finish reasons, usage and log-probabilities."""
    plain = (await api.chat(**fields)).json()
    events = await stream(api, "/v1/chat/completions", {"messages": [user()], **fields})
    text: dict[int, str] = {}
    finish: dict[int, str] = {}
    logprobs: list[Any] = []
    for event in events:
        for choice in event["choices"]:
            text[choice["index"]] = text.get(choice["index"], "") + choice["delta"].get("content", "")
            if choice["finish_reason"]:
                finish[choice["index"]] = choice["finish_reason"]
            if choice["index"] == 0 and choice["logprobs"]:
                logprobs += choice["logprobs"]["content"]
    assert [text[index] for index in sorted(text)] == [c["message"]["content"] for c in plain["choices"]]
    assert [finish[index] for index in sorted(finish)] == [c["finish_reason"] for c in plain["choices"]]
    assert events[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert logprobs == ((plain["choices"][0]["logprobs"] or {}).get("content") or [])


async def stream(api, path, fields) -> list[dict[str, Any]]:
    headers = fields.pop("headers", None) if isinstance(fields, dict) else None
    body = {"model": "tiny", **fields, "stream": True, "stream_options": {"include_usage": True}}
    answer = await api.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


TEXT: dict[str, dict[str, Any]] = {
    "string": {},
    "strings": {"prompt": ["a b", "c"]},
    "token ids": {"prompt": [300, 301, 302]},
    "lists of token ids": {"prompt": [[300, 301], [302]]},
    "mixed": {"prompt": ["a", [300]]},
    "max_tokens default": {},
    "max_tokens": {"max_tokens": 3},
    "n": {"n": 2, "prompt": ["a", "b"]},
    "best_of": {"n": 1, "best_of": 3},
    "echo": {"echo": True},
    "echo of token ids": {"echo": True, "prompt": [300, 301, 302]},
    "echo with logprobs": {"echo": True, "logprobs": 2},
    "scoring": {"echo": True, "logprobs": 0, "max_tokens": 0},
    "logprobs": {"logprobs": 3},
    "logprobs 0": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "stop": {"stop": ["had"], "max_tokens": 40},
    "conversation": {"conversation_id": "text"},
    "seeded": {"seed": 3, "temperature": 0.5},
}


@pytest.mark.parametrize("fields", TEXT.values(), ids=TEXT.keys())
async def test_completion(api, fields):
    answer = await api.complete(**fields)
    assert answer.status_code == 200, answer.text
    body = Completion.model_validate(answer.json())
    prompts = fields.get("prompt", "Hello there")
    prompts = [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else prompts
    assert len(body.choices) == len(prompts) * fields.get("n", 1)
    limit = fields.get("max_tokens", 16)
    tokenizer = make_tokenizer()
    for choice in body.choices:
        prompt = prompts[choice.index // fields.get("n", 1)]
        shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        text = choice.text
        if fields.get("echo"):
            assert text.startswith(shown)
            text = text[len(shown) :]
        params = api.engine.requests[0][1]
        whole = [api.engine.reply_to(len(ids), index, params) for index in range(3)]
        assert any(reply.startswith(text) for reply in whole)
        if limit == 0:
            assert text == ""
        if choice.logprobs is not None:
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
            assert "".join(choice.logprobs.tokens).startswith(choice.text)
            expected = (len(ids) if fields.get("echo") else 0) + limit
            assert len(choice.logprobs.tokens) == expected
    assert body.usage.completion_tokens == (
        limit * len(prompts) * fields.get("best_of", fields.get("n", 1))
        if "stop" not in fields
        else body.usage.completion_tokens
    )


async def test_best_of_returns_the_most_likely(api):
    """Ties keep the first; the fake engine gives every token the same log-probability."""
    answer = (await api.complete(n=1, best_of=3, max_tokens=4)).json()
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] == 12
    assert api.engine.requests[0][1].n == 3


async def test_completion_streams_every_prompt(api):
    events = await stream(api, "/v1/completions", {"prompt": ["a b", "c"], "n": 2, "max_tokens": 5, "echo": True})
    text: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            text[choice["index"]] = text.get(choice["index"], "") + choice["text"]
    assert [text[index] for index in range(4)] == ["a bYour prom", "a bYour prom", "cYour prom", "cYour prom"]
    assert events[-1]["usage"]["completion_tokens"] == 20


async def test_neutral_defaults(api):
    """No hidden penalty, no hidden cut: what OpenAI documents."""
    await api.chat()
    params = api.engine.requests[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.seed, params.n, params.stop) == (None, None, 1, ())


async def test_fields_reach_the_engine(api):
    await api.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=11,
        stop=["x", "y"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"7": 5},
        max_completion_tokens=9,
        min_tokens=2,
        logprobs=True,
        top_logprobs=3,
        n=2,
        stop_token_ids=[9],
        ignore_eos=True,
    )
    params = api.engine.requests[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 40, 0.1, 11)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x", "y"), (9,), True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (dict(params.logit_bias or {}), params.max_tokens, params.min_tokens) == ({7: 5.0}, 9, 2)
    assert (params.logprobs, params.n) == (3, 2)


async def test_tokens_have_exact_bytes(api):
    """A token that is half a character has a replacement text and its true bytes."""
    content = (await api.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    raw = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert raw.decode() == REPLY.format(len(api.engine.requests[0][0]))
    assert content[-1]["token"] == "<|im_end|>"


async def test_tokenize_and_detokenize(api):
    answer = (await api.http.post("/tokenize", json={"prompt": "Hello there", "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert "".join(answer["token_strs"]) == "Hello there"
    back = await api.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "Hello there"}
    rendered = (await api.http.post("/tokenize", json={"messages": [user()], "model": "tiny"})).json()
    await api.chat()
    assert rendered["tokens"] == api.engine.requests[0][0]


async def test_tokenize_renders_tools_as_a_chat_does(api):
    rendered = (await api.http.post("/tokenize", json={"messages": [user()], "tools": TOOLS})).json()
    await api.chat(messages=[user()], tools=TOOLS)
    assert api.engine.requests[0][0] == rendered["tokens"]


async def test_models(api):
    listed = (await api.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert (await api.http.get("/v1/models/tiny")).json() == listed["data"][0]
    missing = await api.http.get("/v1/models/other/name")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
