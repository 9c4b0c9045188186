"""Server-sent events byte by byte: order, framing, errors before and after the first byte."""

from __future__ import annotations

import json

import pytest

from engram_runtime.server.protocol.responses import Engram, Usage


async def events(api, path="/v1/chat/completions", **fields):
    body = {"model": "tiny", "stream": True, **fields}
    body.setdefault(
        "prompt" if path.endswith("/completions") and "chat" not in path else "messages",
        "Hello" if "chat" not in path else [{"role": "user", "content": "Hello"}],
    )
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    parts = answer.text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [part.removeprefix("data: ") for part in parts[:-1]]


def parsed(lines):
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_order_without_usage(api):
    lines = await events(api, max_tokens=3)
    assert lines[-1] == "[DONE]"
    chunks = parsed(lines)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert Engram.model_validate(chunks[-1]["engram"]).turn_number == 1
    assert all("engram" not in chunk for chunk in chunks[:-1])


async def test_order_with_usage(api):
    chunks = parsed(await events(api, max_tokens=3, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert Usage.model_validate(chunks[-1]["usage"]).completion_tokens == 3
    assert Engram.model_validate(chunks[-1]["engram"])
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert all("engram" not in chunk for chunk in chunks[:-1])


async def test_every_choice_has_a_role_and_an_end(api):
    chunks = parsed(await events(api, n=3))
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]]
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert roles == [0, 1, 2]
    assert sorted(ends) == [0, 1, 2]
    assert "engram" in chunks[-1]


async def test_completion_chunks(api):
    lines = await events(api, "/v1/completions", max_tokens=3, logprobs=1)
    chunks = parsed(lines)
    assert lines[-1] == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    offsets = [o for chunk in chunks for o in (chunk["choices"][0]["logprobs"] or {}).get("text_offset", [])]
    assert offsets == sorted(offsets)
    assert len(offsets) == 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_unicode_is_not_escaped_and_line_breaks_are(api):
    api.engine.reply_to = lambda *_: "Zürich\n\ndata: 👋"
    lines = await events(api)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in parsed(lines)) == "Zürich\n\ndata: 👋"
    assert any("ü" in line for line in lines)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_errors_before_the_first_byte_have_their_status(api, path):
    field = {"prompt": "x " * 5000} if "chat" not in path else {"messages": [{"role": "user", "content": "x " * 5000}]}
    answer = await api.http.post(path, json={"model": "tiny", "stream": True, **field})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    api.engine.fail_after = 0
    answer = await api.http.post(
        path,
        json={"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        if "chat" in path
        else {"model": "tiny", "stream": True, "prompt": "x"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


async def test_errors_in_the_middle_are_events(api):
    api.engine.fail_after = 3
    lines = await events(api)
    assert lines[-1] != "[DONE]"
    problem = json.loads(lines[-1])["error"]
    assert (problem["type"], problem["code"]) == ("server_error", "engine_dead")
    assert len(parsed(lines)) == 5
    plain = await api.chat()
    assert plain.status_code == 503


async def test_places_are_given_back_after_a_broken_stream(api):
    api.engine.fail_after = 3
    await events(api)
    assert api.state.admission.inside == 0
    assert api.engine.running == set()
