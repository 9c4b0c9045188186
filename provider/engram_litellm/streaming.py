"""From the server's events to the chunks that LiteLLM keeps.

LiteLLM swallows a finish chunk with an empty delta together with everything on it, and stops at the first empty chunk
after it; the natural order of OpenAI streams (finish, then usage) therefore loses usage, cached tokens and metadata.
What every version from 1.90 keeps is: deltas, one empty delta with the metadata, then one generic chunk that carries
the finish reason and the usage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from litellm.types.utils import ModelResponseStream

from engram_litellm import litellm_errors

_CONTENT = ("content", "tool_calls", "reasoning_content", "function_call", "refusal", "audio")

Chunk = ModelResponseStream | dict[str, Any]


class StreamShaper:
    """Feed lines of the event stream, get chunks; also puts the reply together for the conversation's digest."""

    def __init__(self, model: str, describe: Callable[[Mapping[str, Any] | None], dict[str, Any]]) -> None:
        self._model = model
        self._describe = describe  # completes the server's engram object
        self._finish: str | None = None
        self._usage: dict[str, Any] | None = None
        self._base: dict[str, Any] = {}
        self._text: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._held: list[Chunk] = []
        self.started = False  # something was given out that cannot be taken back
        self.engram: dict[str, Any] = {}

    def feed(self, line: str) -> Iterator[Chunk]:
        """The chunks of one line. Raises litellm's exception for an error event."""
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]" or not data:
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise litellm_errors.connection_error(f"malformed event: {data[:200]}", self._model) from error
        if "error" in event:
            raise self._error(event["error"])
        self._base = {key: event[key] for key in ("id", "created", "model") if event.get(key)} or self._base
        self._usage = event.get("usage") or self._usage
        if isinstance(event.get("engram"), dict):
            self.engram.update(event["engram"])
        choice = (event.get("choices") or [None])[0]
        if choice is None:
            return
        self._finish = choice.get("finish_reason") or self._finish
        delta = choice.get("delta") or {}
        self._collect(delta)
        content = any(delta.get(key) for key in _CONTENT) or bool(choice.get("logprobs"))
        if content or "role" in delta:
            event = {key: value for key, value in event.items() if key not in ("engram", "usage")}
            event["choices"] = [{**choice, "finish_reason": None}]
            self._held.append(ModelResponseStream(**event))
        if (
            content
        ):  # the role alone, sent before the prompt is computed, can wait: until then another replica may answer
            yield from self._give()

    def end(self) -> Iterator[Chunk]:
        """The last two chunks. Raises when the stream ended before the model did."""
        if self._finish is None:
            raise litellm_errors.connection_error("the stream ended without a finish reason", self._model)
        self.engram = self._describe(self.engram)
        empty: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}]}
        last = ModelResponseStream(**empty, **self._base)
        last.choices[0].delta.provider_specific_fields = {"engram": self.engram}
        yield from self._give()
        yield last
        yield {
            "text": "",
            "tool_use": None,
            "is_finished": True,
            "finish_reason": self._finish,
            "usage": self._usage,
            "index": 0,
        }

    def reply(self) -> dict[str, Any]:
        """The assistant's message as a whole."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text)}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return message

    def _give(self) -> Iterator[Chunk]:
        self.started = True
        held, self._held = self._held, []
        yield from held

    def _collect(self, delta: Mapping[str, Any]) -> None:
        if delta.get("content"):
            self._text.append(delta["content"])
        for part in delta.get("tool_calls") or ():
            call = self._calls.setdefault(
                part.get("index") or 0, {"id": None, "function": {"name": None, "arguments": ""}}
            )
            function = part.get("function") or {}
            call["id"] = part.get("id") or call["id"]
            call["function"]["name"] = function.get("name") or call["function"]["name"]
            call["function"]["arguments"] += function.get("arguments") or ""

    def _error(self, error: Any) -> Exception:
        """An error inside a stream that already began."""
        if not isinstance(error, Mapping):
            return litellm_errors.connection_error(str(error), self._model)
        code = error.get("code")
        status = int(str(code)) if str(code).isdecimal() else 500
        return litellm_errors.from_status(
            status if 400 <= status < 600 else 500, str(error.get("message")), self._model, str(code)
        )
