"""`EngramChatConfig`: a turn as the HTTP response beside typed metadata, for code that calls no litellm function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from engram_litellm.metadata import EngramStateMetadata
from engram_litellm.provider import PROVIDER, EngramLLM


class EngramChatConfig:
    """Calls share one provider instance, so discovery, tracker and connections live as long as the config."""

    def __init__(self, provider: EngramLLM | None = None) -> None:
        self._provider = EngramLLM() if provider is None else provider

    async def async_completion(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        api_base: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        optional_params: Mapping[str, Any] | None = None,
        timeout: float | httpx.Timeout | None = None,
    ) -> tuple[httpx.Response, EngramStateMetadata]:
        """One turn. `optional_params` are OpenAI fields, and `extra_body` for the conversation fields.

        Discovery, retries, restores and fallbacks are those of `litellm.acompletion`, and so are the exceptions.
        """
        response, engram = await self._provider.acompletion_raw(
            model=model.removeprefix(f"{PROVIDER}/"),
            messages=list(messages),
            api_base=api_base,
            api_key=api_key,
            headers=dict(headers or {}),
            optional_params=dict(optional_params or {}),
            timeout=timeout,
        )
        return response, EngramStateMetadata.from_dict(engram)
