"""The histories that clients send back, through LiteLLM and the provider: the proof is the one of the other clients.

On the newest LiteLLM, whose own message objects go back as they are, and on the oldest, whose messages go back dumped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import litellm
import pytest

import engram_litellm
from tests.integration.server.test_client_histories import (
    TOKENS,
    Answer,
    World,
    servers,
    test_branches,
    test_cleared_tool_result,
    test_edit,
    test_null_content,
    test_reasoning,
    test_regenerate,
    test_summarised_history,
    test_the_reply_comes_back_as_the_client_keeps_it,
    test_tool_arguments_serialised_anew,
    test_trimmed_history,
)
from tests.support import litellm_floor
from tests.support.litellm_floor import Caller
from tests.support.serving import NAME

__all__ = [
    "servers",
    "test_branches",
    "test_cleared_tool_result",
    "test_edit",
    "test_null_content",
    "test_reasoning",
    "test_regenerate",
    "test_summarised_history",
    "test_the_reply_comes_back_as_the_client_keeps_it",
    "test_tool_arguments_serialised_anew",
    "test_trimmed_history",
]

REGISTERED = engram_litellm.engram  # importing the package is all that an application does
Complete = Callable[..., Any]


class LiteLLM:
    """Replies go back as LiteLLM's message objects, with the metadata that the provider put on them."""

    def __init__(self, url: str, complete: Complete) -> None:
        self._url = url
        self._complete = complete

    def ask(
        self, messages: list[Any], tools: list[Any] | None = None, max_tokens: int = TOKENS, **extra: Any
    ) -> Answer:
        reply = self._complete(
            model=f"engram/{NAME}",
            api_base=self._url,
            messages=messages,
            temperature=0,
            max_tokens=max_tokens,
            extra_body=extra,
            **({"tools": tools} if tools else {}),
        )
        reply = litellm.ModelResponse(**reply) if isinstance(reply, dict) else reply
        used, message = reply.usage, reply.choices[0].message
        told = message.provider_specific_fields["engram"]
        assert told["restored_tokens"] == (used.prompt_tokens_details.cached_tokens or 0)
        return Answer(
            message.content or "", message, used.prompt_tokens, used.completion_tokens, told["restored_tokens"]
        )

    def system(self, text: str) -> Any:
        return {"role": "system", "content": text}

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def said(self, answer: Answer, text: str | None = None) -> Any:
        if text is None:
            return answer.message
        return litellm.Message(role="assistant", content=text)

    def calls(self, arguments: dict[str, Any], **dumps: Any) -> Any:
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps(arguments, **dumps)},
        }
        return litellm.Message(role="assistant", content=None, tool_calls=[call])

    def tool(self, text: str) -> Any:
        return {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": text}

    def newest(self, messages: list[Any], turns: int) -> list[Any]:
        return [messages[0], *messages[len(messages) - 2 * turns + 1 :]]


class Dumped(LiteLLM):
    """Replies go back as dictionaries, every null of the object among them."""

    def said(self, answer: Answer, text: str | None = None) -> Any:
        return super().said(answer, text).model_dump()

    def calls(self, arguments: dict[str, Any], **dumps: Any) -> Any:
        return super().calls(arguments, **dumps).model_dump()


@pytest.fixture(scope="module")
def floor() -> Iterator[Caller]:
    with litellm_floor.running_caller() as caller:
        yield caller


@pytest.fixture(params=["newest", "floor"])
def make_world(request: pytest.FixtureRequest, servers: Callable[[str, str], Any]) -> Callable[..., World]:
    """Every client has the same server before it, so each version gets one architecture."""

    def make(template: str = "tools") -> World:
        if request.param == "newest":
            running, counted = servers("hybrid", template)
            return World(running, counted, LiteLLM(running.url, litellm.completion))
        running, counted = servers("dense", template)
        return World(running, counted, Dumped(running.url, request.getfixturevalue("floor").completion))

    return make
