"""Turns over the device executor (recorded steps, on the CPU): after every restart what was stored is gone on from.

Answers must be those of the host's executor that never forgot anything: a capture that held a token too many, or a
state that had moved on, would show in the next turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engram_kernels import Ops
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.executor.transfer import state_layout
from engram_runtime.models.base import CausalLM
from engram_runtime.snapshots.policy.identity import state_abi
from engram_runtime.snapshots.service import SnapshotService
from engram_runtime.snapshots.types import SnapshotConfig
from tests.support import patience
from tests.support.device_step import load_tiny, make_executor
from tests.support.tiny import make_tiny

MESSAGES = ([7, 8, 9] * 8, [30, 31, 32, 33], list(range(60, 90)))
STOPPED = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=list(range(0, 512, 7)))


def make_engine(kind: str, model: CausalLM, ops: Ops, folder: Path) -> LLMEngine:
    executor: Any = make_executor(kind, model, ops, seqs=4, window=256, tokens=1024)
    folder.mkdir(exist_ok=True)
    service = SnapshotService(
        SnapshotConfig(tenant_key=b"k" * 32, store_uri=f"file://{folder}", gc_interval_seconds=0, **patience.SNAPSHOTS),
        state_abi=state_abi(model.spec.abi_fields()),
        layout=state_layout(model.spec),
        transfer=executor.transfer,
    )
    config = EngineConfig(
        "tiny",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        turn_end_grace_seconds=0.0,
        progress=False,
        seed=0,
        **patience.ENGINE,
    )
    return LLMEngine(config, executor, vocab_size=model.spec.vocab_size, snapshots=service, transfer=executor.transfer)


def take_turn(engine: LLMEngine, history: list[int], message: list[int]) -> tuple[list[int], TurnReport]:
    prompt = [*history, *message, 1, 5]
    candidates = (len(history), *range(len(prompt) - 1, len(prompt) - 8, -1))
    boundaries = {"user_start": len(history), "history": len(prompt) - 2}
    spec = TurnSpec(conversation_id="c", boundaries=boundaries, candidates=candidates)
    engine.add_request("turn", prompt, STOPPED, turn=spec)
    while engine.has_unfinished_requests:
        for output in engine.step():
            last = output
        if engine.idle:
            engine.wait(0.2)
    engine.check_integrity()
    assert last.turn is not None
    return prompt + last.token_ids, last.turn


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_every_turn_in_a_new_process_answers_as_if_nothing_was_forgotten(family: str, tmp_path: Path) -> None:
    model, ops = load_tiny(make_tiny(family, tmp_path / "model"))
    remembering = make_engine("plain", model, ops, tmp_path / "theirs")
    ours: list[int] = []
    theirs: list[int] = []
    for number, message in enumerate(MESSAGES):
        theirs, _ = take_turn(remembering, theirs, message)
        engine = make_engine("recorded", model, ops, tmp_path / "ours")
        before = len(ours)
        ours, report = take_turn(engine, ours, message)
        assert ours == theirs
        # The last token of an answer was never fed: it is pending, everything before it is restored.
        assert report.restored_tokens == max(0, before - 1)
        assert (report.tier == "store") == (number > 0)
        engine.flush()
        assert engine.snapshots is not None
        assert engine.snapshots.flush(240)
        engine.close()
    remembering.close()
