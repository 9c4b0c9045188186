"""The real LiteLLM proxy in front of our provider. Skipped where the proxy's own requirements are not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.provider.styles import HI
from tests.support.fake_openai import FakeEngine
from tests.support.ports import free_port

pytest.importorskip("litellm.proxy.proxy_server", reason='needs pip install "litellm[proxy]"', exc_type=ImportError)

KEY = "sk-engram-test-key-77"


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("proxy")
    (folder / "engram_handler.py").write_text("from engram_litellm import engram\n")
    config = {
        "model_list": [
            {"model_name": "chat", "litellm_params": {"model": "engram/m", "api_base": engine.url}},
            {"model_name": "engram/*", "litellm_params": {"model": "engram/*", "api_base": engine.url}},
        ],
        "litellm_settings": {
            "custom_provider_map": [{"provider": "engram", "custom_handler": "engram_handler.engram"}]
        },
        "general_settings": {"master_key": KEY},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "ENGRAM_PROXY_TENANT": "key"}
    command = [sys.executable, "-m", "litellm.proxy.proxy_cli", "--config", "config.yaml", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1"], cwd=folder, env=environment, stdout=log, stderr=log
        )
    base = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=base, headers={"Authorization": f"Bearer {KEY}"}, timeout=240) as client:
            end = time.monotonic() + 240  # a minute of imports on a busy machine
            while True:
                try:
                    if client.get("/health/liveliness").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                running = process.poll() is None and time.monotonic() < end
                assert running, (folder / "log").read_text()[-3000:]
                time.sleep(0.3)
            yield client
    finally:
        process.terminate()
        process.wait(240)


def test_sessions_tenants_and_headers(proxy: httpx.Client, engine: FakeEngine) -> None:
    body = {"model": "chat", "messages": HI}
    answer = proxy.post("/v1/chat/completions", json=body, headers={"x-litellm-session-id": "sess-9"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "hello world"
    assert answer.headers["llm_provider-x-engram-replica"]
    assert engine.chats()[-1]["conversation_id"] == "sess-9"
    assert engine.requests[-1].headers["x-engram-tenant"]


def test_an_echoed_message_continues_its_conversation(proxy: httpx.Client, engine: FakeEngine) -> None:
    first = proxy.post("/v1/chat/completions", json={"model": "engram/m2", "messages": HI}).json()
    message = first["choices"][0]["message"]
    second = proxy.post("/v1/chat/completions", json={"model": "engram/m2", "messages": [*HI, message, *HI]}).json()
    conversation = message["provider_specific_fields"]["engram"]["conversation_id"]
    assert engine.chats()[-1]["conversation_id"] == conversation
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 20
    assert all("provider_specific_fields" not in sent for sent in engine.chats()[-1]["messages"])


def test_streams_carry_metadata_and_usage(proxy: httpx.Client) -> None:
    body = {"model": "chat", "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    with proxy.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "hello world"
    assert any((delta.get("provider_specific_fields") or {}).get("engram") for delta in deltas)
    assert events[-1]["usage"]["total_tokens"] == 17
