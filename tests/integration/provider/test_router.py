"""LiteLLM's Router over our provider: retries, fallbacks, sessions."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import litellm
import pytest

from tests.integration.provider.styles import HI, REGISTERED
from tests.support.fake_openai import FakeEngine, Fault

assert REGISTERED is not None
VERSION = tuple(int(part) for part in version("litellm").split(".")[:2])


def router(*models: tuple[str, str, str], **options: Any) -> litellm.Router:
    """Deployments as (group, model, api_base)."""
    deployments = [
        {"model_name": group, "litellm_params": {"model": f"engram/{model}", "api_base": base, "max_retries": 0}}
        for group, model, base in models
    ]
    return litellm.Router(model_list=deployments, **options)


def test_plain_calls(engine: FakeEngine) -> None:
    route = router(("chat", "m", engine.url))
    assert route.completion(model="chat", messages=HI).choices[0].message.content == "hello world"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in route.completion("chat", HI, stream=True))
    assert text == "hello world"


@pytest.mark.parametrize("stream", [False, True])
async def test_retries(stream: bool, engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(status=429, times=2)
    if stream and VERSION < (1, 108):
        pytest.skip("the Router of this LiteLLM does not retry async streams")
    route = router(("chat", "m", engine.url), num_retries=3, retry_after=0)
    answer = await route.acompletion(model="chat", messages=HI, stream=stream)
    if stream:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
    else:
        text = answer.choices[0].message.content
    assert text == "hello world"
    assert len(engine.chats()) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_fallbacks(stream: bool, engine: FakeEngine) -> None:
    engine.faults["bad"] = Fault(status=503)
    route = router(
        ("chat", "bad", engine.url), ("spare", "good", engine.url), fallbacks=[{"chat": ["spare"]}], num_retries=0
    )
    answer = await route.acompletion(model="chat", messages=HI, stream=stream)
    if stream:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
    else:
        text = answer.choices[0].message.content
    assert text == "hello world"
    assert [body["model"] for body in engine.chats()] == ["bad", "good"]


async def test_context_window_fallbacks(engine: FakeEngine) -> None:
    engine.faults["small"] = Fault(status=400, message="maximum context length is 4096 tokens")
    route = router(
        ("chat", "small", engine.url),
        ("long", "large", engine.url),
        context_window_fallbacks=[{"chat": ["long"]}],
        num_retries=0,
    )
    answer = await route.acompletion(model="chat", messages=HI)
    assert answer.choices[0].message.content == "hello world"
    assert engine.chats()[-1]["model"] == "large"


def test_a_session_names_the_conversation(engine: FakeEngine) -> None:
    route = router(("chat", "m", engine.url))

    async def turns() -> None:
        for _ in range(2):
            await route.acompletion(model="chat", messages=HI, metadata={"session_id": "s-1"})

    asyncio.run(turns())
    assert [body["conversation_id"] for body in engine.chats()] == ["s-1", "s-1"]


def test_our_place_in_the_map_survives_other_providers() -> None:
    """`custom_provider_map = [...]` replaces the list, which is what LiteLLM's own guide shows."""
    entry = {"provider": "engram", "custom_handler": REGISTERED}
    assert entry in litellm.custom_provider_map
    assert "engram" in litellm._custom_providers
