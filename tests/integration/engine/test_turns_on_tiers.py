"""Turns of a conversation on every tier: same tokens as never evicted, only the new tokens computed, counted by an op.

The count is the embedding op's, not the engine's own word: rows seen = prompt + generated - pending - restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.executor.executor import Executor
from engram_runtime.executor.memory import CacheRequest, plan_caches
from engram_runtime.executor.transfer import state_layout
from engram_runtime.snapshots.policy.identity import state_abi
from engram_runtime.snapshots.service import SnapshotService
from engram_runtime.snapshots.types import SnapshotConfig
from tests.integration.engine.conftest import Tiny, run
from tests.support import patience

Get = Callable[[str], Tiny]
MakeEngine = Callable[..., LLMEngine]
FAMILIES = ("llama", "granite")
SYSTEM = list(range(100, 137))
GENERATED = 11
GREEDY = SamplingParams(temperature=0.0, max_tokens=GENERATED, ignore_eos=True)


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    """Engines over one store; closing each is the end of its process as far as the store can tell."""
    alive: list[LLMEngine] = []

    def make(one: Tiny, *, disk: bool = True, store: bool = True, tokens: int = 1024, key: bytes = b"k") -> LLMEngine:
        geometry = plan_caches(one.model.spec, CacheRequest(4, 256, tokens, 4, 12), 1 << 30)
        executor = Executor(one.model, one.ops, geometry, torch.device("cpu"))
        (tmp_path / "store").mkdir(exist_ok=True)
        config = SnapshotConfig(
            tenant_key=key * 32,
            disk_path=tmp_path / "disk" if disk else None,
            store_uri=f"file://{tmp_path}/store" if store else None,
            gc_interval_seconds=0,
            **patience.SNAPSHOTS,
        )
        service = SnapshotService(
            config,
            state_abi=state_abi(one.model.spec.abi_fields()),
            layout=state_layout(one.model.spec),
            transfer=executor.transfer,
        )
        engine = LLMEngine(
            EngineConfig(
                str(one.path),
                max_num_seqs=4,
                max_num_batched_tokens=64,
                turn_end_grace_seconds=0.0,
                progress=False,
                **patience.ENGINE,
            ),
            executor,
            vocab_size=one.model.spec.vocab_size,
            tokenizer=one.tokenizer,
            snapshots=service,
            transfer=executor.transfer,
        )
        alive.append(engine)
        return engine

    yield make
    for engine in alive:
        engine.close()


def turn(
    one: Tiny, engine: LLMEngine, history: list[int], message: list[int], **options: object
) -> tuple[RequestOutput, TurnReport]:
    """One turn; checks the count of the embedding op against the report."""
    prompt = [*history, *message, 1, 5]
    candidates = (len(history), *range(len(prompt) - 1, len(prompt) - 8, -1))
    spec = TurnSpec(
        boundaries={"user_start": len(history), "history": len(prompt) - 2},
        candidates=candidates,
        **options,  # type: ignore[arg-type]
    )
    before = sum(one.rows)
    engine.add_request("turn", prompt, GREEDY, turn=spec)
    while engine.has_unfinished_requests:
        for output in engine.step():
            last = output
        if engine.idle:
            engine.wait(0.2)
    engine.check_integrity()
    report = last.turn
    assert report is not None
    assert sum(one.rows) - before == len(prompt) + GENERATED - 1 - report.restored_tokens
    assert report.prefilled_tokens == len(prompt) - report.restored_tokens
    return last, report


def rewarm(engine: LLMEngine, tokens: list[int], report: TurnReport) -> None:
    engine.add_warm("warm", tokens, TurnSpec(conversation_id=report.conversation_id, turn_number=report.turn_number))
    assert run(engine)["warm", 0].turn is not None


def settle(engine: LLMEngine) -> None:
    """Everything captured so far is durable."""
    assert engine.snapshots is not None
    engine.flush()
    assert engine.snapshots.flush(240)


def evict(engine: LLMEngine) -> None:
    """Fill the GPU tier with something else."""
    for number in range(8):
        engine.add_request(f"other{number}", [200 + number] * 200, SamplingParams(max_tokens=1))
    run(engine)


def conversation(one: Tiny, engine: LLMEngine) -> list[int]:
    """Two finished and rewarmed turns; the tokens the third goes on from."""
    history = SYSTEM
    for message in ([21, 22, 23], [31, 32, 33, 34, 35]):
        output, report = turn(one, engine, history, message, conversation_id="c")
        history = [*history, *message, 1, 5, *output.token_ids, 9]
        rewarm(engine, history, report)
    settle(engine)
    return history


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tier", ["gpu", "host", "disk", "store"])
def test_the_third_turn_on_every_tier(tiny: Get, make_engine: MakeEngine, family: str, tier: str) -> None:
    one = tiny(family)
    engine = make_engine(one)
    history = conversation(one, engine)
    message = [41, 42]
    expected, report = turn(one, engine, history, message, conversation_id="c", save=False)
    assert (report.tier, report.restored_tokens) == ("gpu", len(history))
    if tier == "host":
        evict(engine)
    elif tier != "gpu":
        engine.close()
        engine = make_engine(one, disk=tier == "disk")
    if tier != "gpu":
        output, report = turn(one, engine, history, message, conversation_id="c", save=False)
        assert (report.tier, report.restored_tokens) == (tier, len(history))
        assert report.bytes > 0
        assert report.turn_number == 3
        assert output.token_ids == expected.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_machine_that_has_only_the_store_finds_a_plain_clients_conversation(
    tiny: Get, make_engine: MakeEngine, family: str
) -> None:
    one = tiny(family)
    engine = make_engine(one)
    history = conversation(one, engine)
    engine.close()
    _, report = turn(one, make_engine(one, disk=False), history, [41, 42])
    assert report.restored_tokens == len(history)
    assert (report.conversation_id, report.turn_number) == ("c", 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_depends_on_what_was_restored(tiny: Get, make_engine: MakeEngine, family: str) -> None:
    # Another history under the same last message: if a restore were ignored, both would answer alike.
    one = tiny(family)
    engine = make_engine(one)
    answers = []
    for secret in (300, 301):
        output, report = turn(one, engine, SYSTEM, [secret, 22, 23])
        history = [*SYSTEM, secret, 22, 23, 1, 5, *output.token_ids, 9]
        rewarm(engine, history, report)
        settle(engine)
        evict(engine)
        output, report = turn(one, engine, history, [41, 42], save=False)
        assert report.tier == "host"
        answers.append(output.token_ids)
    assert answers[0] != answers[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_another_tenant_or_key_restores_nothing(tiny: Get, make_engine: MakeEngine, family: str) -> None:
    one = tiny(family)
    engine = make_engine(one)
    history = conversation(one, engine)
    engine.close()
    _, report = turn(one, make_engine(one), history, [41], tenant="other")
    assert (report.restored_tokens, report.restore_failed) == (0, False)
    _, report = turn(one, make_engine(one, key=b"x"), history, [41])
    assert report.restored_tokens == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_of_the_last_message_restores_up_to_it(tiny: Get, make_engine: MakeEngine, family: str) -> None:
    one = tiny(family)
    engine = make_engine(one)
    turn(one, engine, SYSTEM, [21, 22, 23], conversation_id="c")
    settle(engine)
    engine.close()
    _, report = turn(one, make_engine(one), SYSTEM, [81, 82], conversation_id="c")
    assert report.restored_tokens == len(SYSTEM)


@pytest.mark.parametrize("family", FAMILIES)
def test_damage_on_every_tier_ends_in_a_prefill_with_the_right_answer(
    tiny: Get, make_engine: MakeEngine, family: str, tmp_path: Path
) -> None:
    one = tiny(family)
    engine = make_engine(one, disk=False)
    history = conversation(one, engine)
    expected, _ = turn(one, engine, history, [41, 42], save=False)
    engine.close()
    for file in (tmp_path / "store").rglob("*"):
        if file.is_file() and file.stat().st_size > 4096:
            damaged = bytearray(file.read_bytes())
            for place in range(4096, len(damaged), 97):
                damaged[place] ^= 0xFF
            file.write_bytes(damaged)
    output, report = turn(one, make_engine(one, disk=False), history, [41, 42], conversation_id="c")
    assert output.token_ids == expected.token_ids
    assert report.restored_tokens == 0
    assert report.restore_failed
    assert report.restore_error
