"""The original server's five calls over the real engine: restore-and-generate really continues, from what was saved."""

from __future__ import annotations

import httpx
import pytest

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.server.protocol.legacy import LegacyInfo, LegacyRestored, LegacySnapshots
from engram_runtime.snapshots.types import SnapshotConfig
from tests.support import patience
from tests.support.counting import Counted
from tests.support.serving import NAME, serving
from tests.support.tiny import make_tiny

TEXTS = ("Who wrote the book?", "And what is the capital of France?")
CONTINUATION = [70, 71, 72, 73, 74]
TOKENS = 12


@pytest.fixture(scope="module", params=["llama", "granite"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / request.param
    make_tiny(request.param, path)
    return path


def served(model, store, counted):
    def load():
        config = EngineConfig(model=str(model), progress=False, device="cpu", **patience.ENGINE)
        snapshots = SnapshotConfig(tenant_key=b"k" * 32, **patience.SNAPSHOTS, store_uri=f"file://{store}")
        return AsyncLLMEngine.from_config(config, snapshots, registry=counted.registry)

    return serving(load)


def test_continues_the_conversation_of_another_process(model, tmp_path):
    """Greedy, and token for token what computing the whole history gives; only the continuation is computed."""
    with served(model, tmp_path, Counted()) as running, httpx.Client(base_url=running.url, timeout=240) as http:
        messages = []
        for text in TEXTS:
            messages.append({"role": "user", "content": text})
            body = {"model": NAME, "messages": messages, "max_tokens": 8, "temperature": 0, "conversation_id": "c"}
            answer = http.post("/v1/chat/completions", json=body).json()
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            at_once = http.post("/restore_snapshot", json={"conversation_id": "c"}).json()
            assert at_once["turn_number"] == answer["engram"]["turn_number"]
        for turn in (1, 2):
            saved = http.post("/save_snapshot", json={"conversation_id": "c", "turn_number": turn})
            assert saved.status_code == 200, saved.text
    counted = Counted()
    with served(model, tmp_path, counted) as running, httpx.Client(base_url=running.url, timeout=240) as http:
        info = http.post("/get_snapshot_info", json={"conversation_id": "c", "turn_number": 2})
        info = LegacyInfo.model_validate(info.json()).metadata
        pending = len(info.fill_ids) - info.token_count
        assert (info.boundary, pending, info.tier) in (("turn_end", 1, "store"), ("next_history", 0, "store"))
        fetched = LegacyRestored.model_validate(http.post("/restore_snapshot", json={"conversation_id": "c"}).json())
        assert (fetched.turn_number, fetched.tier, fetched.token_count) == (2, "store", info.token_count)
        assert fetched.bytes > 0
        assert fetched.restore_time_ms > 0
        assert counted.rows == 0
        body = {
            "conversation_id": "c",
            "create_new_request": True,
            "continuation_ids": CONTINUATION,
            "max_new_tokens": TOKENS,
            "ignore_eos": True,
        }
        restored = http.post("/restore_snapshot", json=body)
        assert restored.status_code == 200, restored.text
        restored = LegacyRestored.model_validate(restored.json())
        assert counted.rows == pending + len(CONTINUATION) + TOKENS - 1
        assert restored.engram.restored_tokens == restored.token_count == info.token_count
        whole = {
            "model": NAME,
            "prompt": [*info.fill_ids, *CONTINUATION],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stateful_mode": "stateless",
        }
        counted.rows = 0
        plain = http.post("/v1/completions", json=whole).json()
        assert counted.rows == len(info.fill_ids) + len(CONTINUATION) + TOKENS - 1
        assert restored.output_text == plain["choices"][0]["text"]
        decoded = http.post("/detokenize", json={"tokens": restored.output_ids}).json()["prompt"]
        assert decoded == restored.output_text
        assert len(restored.output_ids) == TOKENS
        listed = LegacySnapshots.model_validate(http.post("/list_snapshots", json={"conversation_id": "c"}).json())
        assert [item.turn_number for item in listed.snapshots][-1] == 2
        deleted = http.post("/delete_snapshot", json={"conversation_id": "c", "turn_number": 2})
        assert deleted.status_code == 200
        for name in ("restore_snapshot", "get_snapshot_info", "save_snapshot"):
            assert http.post(f"/{name}", json={"conversation_id": "c", "turn_number": 2}).status_code == 404
