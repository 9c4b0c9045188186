"""A finished, unstreamed answer as LiteLLM's ModelResponse."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import httpx
from litellm.types.utils import ModelResponse

from engram_litellm import litellm_errors


def parse_answer(response: httpx.Response, model: str) -> dict[str, Any]:
    """The JSON of a chat completion; litellm's exception when it is none."""
    try:
        answer = json.loads(response.content)
    except ValueError as error:
        raise litellm_errors.connection_error("the answer is not JSON", model) from error
    if not isinstance(answer, dict) or not answer.get("choices"):
        raise litellm_errors.connection_error("the answer is not a chat completion", model)
    return answer


def engram_of(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """The server's `engram` object, if there is one."""
    engram = answer.get("engram")
    return engram if isinstance(engram, dict) else None


def build_response(
    answer: Mapping[str, Any], model: str, headers: Mapping[str, str], engram: dict[str, Any]
) -> ModelResponse:
    """The response, with the `engram` object on every message and in `_hidden_params`."""
    fields = {key: value for key, value in answer.items() if key != "engram"}
    fields["id"] = fields.get("id") or f"chatcmpl-{uuid.uuid4().hex}"  # null ids collide in spend logs
    response = ModelResponse(**fields)
    response.model = f"engram/{model}"
    for choice in response.choices:
        message = choice.message
        message.provider_specific_fields = {**(message.provider_specific_fields or {}), "engram": engram}
    hidden = response._hidden_params
    hidden["engram"] = engram
    hidden["additional_headers"] = {
        f"llm_provider-{name}": value for name, value in headers.items() if name.lower().startswith("x-")
    }
    if engram.get("replica"):
        hidden["additional_headers"]["llm_provider-x-engram-replica"] = engram["replica"]
    return response


def reply_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The message of the first choice."""
    message = answer["choices"][0].get("message") or {}
    return {"role": "assistant", **message}
