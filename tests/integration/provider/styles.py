"""The four ways to call LiteLLM, behind one function, so that every behaviour is tested in all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import litellm

import engram_litellm

REGISTERED = engram_litellm.engram  # importing the package is all that an application does
STYLES = ("sync", "async", "stream", "astream")
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]


@dataclass
class Outcome:
    """What a caller sees, whichever way it called."""

    message: Any
    finish: str
    usage: Any
    id: str
    chunks: list[Any]

    @property
    def text(self) -> str:
        return self.message.content

    @property
    def engram(self) -> dict[str, Any]:
        return self.message.provider_specific_fields["engram"]


def ask(style: str, messages: list[Any] | None = None, **kwargs: Any) -> Outcome:
    """One turn. Streams are put together by LiteLLM's own stream_chunk_builder."""
    kwargs.setdefault("model", "engram/m")
    kwargs["messages"] = HI if messages is None else messages
    chunks: list[Any] = []
    if style == "sync":
        response = litellm.completion(**kwargs)
    elif style == "async":
        response = asyncio.run(litellm.acompletion(**kwargs))
    else:
        chunks = list(litellm.completion(stream=True, **kwargs)) if style == "stream" else asyncio.run(collect(kwargs))
        response = litellm.stream_chunk_builder(chunks, messages=kwargs["messages"])
    choice = response.choices[0]
    return Outcome(choice.message, choice.finish_reason, response.usage, response.id, chunks)


async def collect(kwargs: dict[str, Any]) -> list[Any]:
    stream = await litellm.acompletion(stream=True, **kwargs)
    return [chunk async for chunk in stream]


def failure(call: Callable[[], Any]) -> BaseException:
    """The exception of a call that must fail; LiteLLM hides those of async streams behind one of its own."""
    try:
        call()
    except Exception as error:
        if type(error).__name__ == "MidStreamFallbackError":
            return error.original_exception
        return error
    raise AssertionError("the call did not fail")
