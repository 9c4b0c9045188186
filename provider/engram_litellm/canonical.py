"""One canonical form of a chat message, so that a turn is recognised however a client writes it back.

Clients re-render the assistant's turn: nulls are added, content becomes a list of parts, tool arguments are serialised
again with other spaces, reasoning is dropped, our own metadata is echoed. None of that changes the conversation, so
none of it may change the digest. An edit of the text, a tool call's arguments, a role or an id does change it.

The form is a sequence of length-prefixed fields, not JSON: it is injective, and hashing a long history costs what
SHA-256 costs instead of a JSON escape per character.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ROLES = {"developer": "system", "function": "tool"}
_TEXT_TYPES = ("text", "input_text", "output_text")
_REASONING_TYPES = ("thinking", "reasoning", "redacted_thinking")
_IMAGE_TYPES = ("image_url", "input_image")
# Written by our provider or by LiteLLM into messages; a strict server refuses what is not part of the OpenAI request.
_ECHOED = ("provider_specific_fields", "engram", "thinking_blocks")


def as_mapping(message: Any) -> dict[str, Any]:
    """A message as a plain dict, whether it came as one or as a pydantic object of litellm or openai."""
    if isinstance(message, dict):  # not copied: nothing here writes into a message
        return message
    if isinstance(message, Mapping):
        return dict(message)
    dump = getattr(message, "model_dump", None)
    if dump is None:
        raise ValueError(f"messages must hold objects, got {type(message).__name__}")
    result: dict[str, Any] = dump()
    return result


def canonical(message: Mapping[str, Any]) -> bytes:
    """The canonical bytes of one message. Reasoning, nulls, cache marks and echoed metadata are not part of it."""
    role = str(message.get("role"))
    role = _ROLES.get(role, role)
    content = message.get("content")
    out = [_field("role", role)]
    if isinstance(content, str):  # nearly all messages, and the long ones
        if content:
            out.append(_field("text", content))
    else:
        out.extend(_field(tag, value) for tag, value in _parts(content))
    for call in message.get("tool_calls") or ():
        call = as_mapping(call)
        out.append(_field("call", str(call.get("id"))))
        out.extend(_field(tag, value) for tag, value in _function(call.get("function")))
    if message.get("function_call"):
        out.extend(_field(tag, value) for tag, value in _function(message["function_call"]))
    if role == "tool":
        out.append(_field("for", str(message.get("tool_call_id"))))
    elif message.get("name"):
        out.append(_field("name", str(message["name"])))
    return b"".join(out)


def cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as it is sent: nulls and echoed metadata taken off, tool calls in the request's own shape."""
    out = {key: value for key, value in message.items() if value is not None and key not in _ECHOED}
    if "content" not in out and message.get("role") != "assistant":
        out["content"] = message.get("content")  # the server, not we, says what is wrong with it
    if isinstance(out.get("content"), list):
        out["content"] = [_cleaned_part(part) for part in out["content"]]
    if isinstance(out.get("tool_calls"), list):
        calls = [_cleaned_call(as_mapping(call)) for call in out["tool_calls"]]
        if calls:
            out["tool_calls"] = calls
        else:
            del out["tool_calls"]
    for key in ("annotations", "images"):  # empty lists that litellm's own message objects carry
        if out.get(key) == []:
            del out[key]
    return out


def echoed_conversation(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The conversation id that an application echoed by sending back our message object, newest first."""
    for message in reversed(messages):
        for holder in (message.get("provider_specific_fields"), message):
            engram = holder.get("engram") if holder and isinstance(holder, (dict, Mapping)) else None
            if engram and isinstance(engram, Mapping) and isinstance(engram.get("conversation_id"), str):
                return str(engram["conversation_id"])
    return None


def _field(tag: str, value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"%b:%d:%b" % (tag.encode(), len(data), data)


def _parts(content: Any) -> Iterator[tuple[str, str]]:
    """Content as (tag, value) fields; adjacent texts are joined, because templates render them the same."""
    if content is None:
        return
    if not isinstance(content, Sequence):
        yield "other", json.dumps(content, sort_keys=True, default=str)
        return
    text: list[str] = []
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else as_mapping(part)
        kind = part.get("type")
        if kind in _TEXT_TYPES:
            text.append(str(part.get("text") or ""))
            continue
        if kind in _REASONING_TYPES:
            continue
        if any(text):
            yield "text", "".join(text)
        text = []
        if kind in _IMAGE_TYPES:
            url = part.get("image_url")
            url = url.get("url") if isinstance(url, Mapping) else url
            yield "image", hashlib.sha256(str(url or "").encode("utf-8", "surrogatepass")).hexdigest()
        else:
            kept = {key: value for key, value in part.items() if key != "cache_control"}
            yield "other", json.dumps(kept, sort_keys=True, default=str)
    if any(text):
        yield "text", "".join(text)


def _function(function: Any) -> Iterator[tuple[str, str]]:
    function = as_mapping(function) if function else {}
    yield "function", str(function.get("name"))
    yield "arguments", _arguments(function.get("arguments"))


def _arguments(arguments: Any) -> str:
    """Tool arguments without the spaces of whoever serialised them. Key order stays: templates print it."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return str(arguments)
    return json.dumps(arguments or {}, separators=(",", ":"), ensure_ascii=False, default=str)


def _cleaned_part(part: Any) -> Any:
    if isinstance(part, Mapping) and "cache_control" in part:
        return {key: value for key, value in part.items() if key != "cache_control"}
    return part


def _cleaned_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = as_mapping(call.get("function") or {})
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False, default=str)
    out: dict[str, Any] = {"type": call.get("type") or "function"}
    if call.get("id") is not None:
        out["id"] = call["id"]
    out["function"] = {"name": function.get("name"), "arguments": arguments}
    return out
