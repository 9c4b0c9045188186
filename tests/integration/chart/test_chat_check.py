"""What `helm test` runs, against the real engine: dense and hybrid, and a chat template that strips reasoning."""

from __future__ import annotations

import pytest

from engram_operator.chat_check import main
from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.snapshots.types import SnapshotConfig
from tests.support import patience
from tests.support.serving import NAME, serving
from tests.support.tiny import make_tiny


@pytest.mark.parametrize(("family", "template"), [("llama", "chatml"), ("granite", "think_strip")])
def test_the_second_turn_of_a_real_engine_is_restored(tmp_path, capsys, family, template):
    path = make_tiny(family, tmp_path / "model", template=template)
    config = EngineConfig(model=str(path), progress=False, **patience.ENGINE)
    snapshots = SnapshotConfig(tenant_key=b"k" * 32, **patience.SNAPSHOTS)
    with serving(lambda: AsyncLLMEngine.from_config(config, snapshots)) as server:
        code = main(["--model", NAME, "--service-url", server.url, "--timeout-seconds", "120"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "good" in said.out
