"""A conversation of 50 turns through the whole engine, alone and sixteen in lockstep: the main job.

    make bench-gpu PART=chat        (or: tests/bench/bench_chat.py [--models Qwen3-8B,...])

Each turn sends everything said so far and 40 new tokens, of which the last 3 are the generation prompt, and has 60
generated: 124,500 prompt tokens in all. The engine runs as `engram serve` has it, with snapshots into host memory and
the boundaries of a chat (user_start, history, turn_end). Counted: prompt tokens computed (bar: the new ones, which are
the 40 and the token sampled last, and no history), the time to the first token, the time per output token. Four of the
last answers are judged by the same weights in fp32 in this process, whole history included (decode_judge).
Results: chat.json.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.models.base import CausalLM
from engram_runtime.snapshots.types import SnapshotConfig
from tests.bench import bench_step
from tests.bench.decode_judge import Judge
from tests.bench.engine_runs import (
    Ask,
    Run,
    against,
    drive,
    judged,
    make_engine,
    random_tokens,
    rounded,
)
from tests.bench.gpu_timing import COPY_TBS, save

TURNS, USER, GENERATION_PROMPT, ANSWER = 50, 40, 3, 60
WARM_UP = 4
"""Turns of another conversation that compile and record."""
MANY = 16
JUDGED = 4
"""Answers that are judged: one of 60 tokens is too few, a near-tie lost by 0.3 alone doubles what is measured."""
TTFT_BAR_MS = {"Qwen3-0.6B": 4, "Qwen3-8B": 7, "Llama-3.1-8B": 7, "Granite-4.0-H-tiny": 10}
MANY_BAR_MS = {"Qwen3-8B": 30, "Granite-4.0-H-tiny": 45}
VLLM = {
    "Qwen3-0.6B": {"computed": 2484, "ttft_mean": 17.0, "ttft_p95": 21.2, "tpot": 2.09},
    "Qwen3-8B": {"computed": 2484, "ttft_mean": 17.7, "ttft_p95": 21.1, "tpot": 5.19, "many_ttft_mean": 72},
    "Granite-4.0-H-tiny": {
        "computed": 14420, "ttft_mean": 78.6, "ttft_p95": 154, "tpot": 4.48, "many_ttft_mean": 320,
    },
}  # fmt: skip


class Chat:
    """One conversation: what was said, and the next turn of it."""

    def __init__(self, model: CausalLM, name: str, seed: int) -> None:
        self._rng, self._vocab = random.Random(seed), model.spec.vocab_size
        self.name, self.tokens, self.turn = name, random_tokens(model, 0, seed), 0

    def ask(self) -> Ask:
        start = len(self.tokens)
        self.tokens += [self._rng.randrange(self._vocab) for _ in range(USER)]
        self.turn += 1
        boundaries = {"user_start": start, "history": len(self.tokens) - GENERATION_PROMPT}
        spec = TurnSpec(conversation_id=self.name, boundaries=boundaries, candidates=(start,))
        return Ask(list(self.tokens), ANSWER, spec)

    def hear(self, run: Run) -> None:
        self.tokens += run.tokens


def talk(engine: LLMEngine, chats: Sequence[Chat], turns: int) -> list[Run]:
    """All chats in lockstep: a turn begins when everybody's last one has ended."""
    found: list[Run] = []
    for _ in range(turns):
        runs = drive(engine, {f"{chat.name}-{chat.turn}": chat.ask() for chat in chats})
        for chat, run in zip(chats, runs.values(), strict=True):
            chat.hear(run)
        found += runs.values()
    return found


def measure(engine: LLMEngine, model: CausalLM, name: str, chats: int, judge: Judge) -> dict[str, Any]:
    talk(engine, [Chat(model, f"warm{chats}-{i}", 100 * chats + i) for i in range(chats)], WARM_UP)
    before = engine.stats()
    talkers = [Chat(model, f"chat{chats}-{i}", 5000 * chats + i) for i in range(chats)]
    runs = talk(engine, talkers, TURNS)
    after = engine.stats()
    computed = after.prefilled_tokens - before.prefilled_tokens
    # The token sampled last in a turn is fed by the next one.
    fresh = chats * (TURNS * USER + TURNS - 1)
    ttfts = [run.ttft_ms for run in runs]
    tpots = [ms for run in runs for ms in run.tpot_ms[1:]]
    read = bench_step._read_bytes(model, chats, TURNS * (USER + ANSWER) // 2)
    peer = VLLM.get(name, {})
    single = chats == 1
    row: dict[str, Any] = {
        "model": name, "chats": chats, "turns": TURNS,
        "prompt_tokens": sum(run.last.prompt_tokens for run in runs if run.last is not None),
        "computed": computed, "new": fresh, "recomputed": after.recomputed_tokens - before.recomputed_tokens,
        "vllm_computed": peer.get("computed") if single else None, "ttft_ms": rounded(ttfts),
        "tpot_ms": rounded(tpots, 3), "vllm_tpot_ms": peer.get("tpot") if single else None,
    }  # fmt: skip
    bar = TTFT_BAR_MS.get(name) if single else MANY_BAR_MS.get(name)
    against(
        row,
        statistics.fmean(ttfts),
        floor=read / COPY_TBS / 1e9,
        bar=bar,
        peer=peer.get("ttft_mean" if single else "many_ttft_mean"),
    )
    if computed > fresh or row["recomputed"]:
        raise RuntimeError(f"{computed} prompt tokens were computed, {fresh} are new")
    prompts, answers = zip(*last_answers(talkers), strict=True)
    row.update(judged(judge, prompts, answers))
    return row


def last_answers(talkers: Sequence[Chat]) -> Iterator[tuple[list[int], list[int]]]:
    """JUDGED prompts with their answers: the last of as many chats, or the last ones of the only chat."""
    for number in range(JUDGED):
        said = talkers[-1 - number].tokens if len(talkers) > 1 else talkers[0].tokens
        end = len(said) - (0 if len(talkers) > 1 else number * (USER + ANSWER))
        yield said[: end - ANSWER], said[end - ANSWER : end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="Qwen3-0.6B,Qwen3-8B,Llama-3.1-8B,Granite-4.0-H-tiny")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed = 0
    for name in args.models.split(","):
        try:
            run_model(name, rows)
        except Exception:  # the other models' figures are worth having
            traceback.print_exc()
            failed += 1
        gc.collect()
        torch.cuda.empty_cache()
    sys.exit(1 if failed else 0)


def run_model(name: str, rows: list[dict[str, Any]]) -> None:
    """Add a model's rows, saved one by one."""
    with torch.no_grad():
        model = bench_step.build(name, positions=6144)
    judge = Judge(model, bench_step.CONFIGS[name](), 6144)
    snapshots = SnapshotConfig(tenant_key=bytes(range(32)), host_bytes=16 << 30, gc_interval_seconds=0)
    engine, _ = make_engine(model, MANY, 6144, 2 * MANY * 6144, snapshots=snapshots, checkpoints=96)
    for chats in (1, MANY):
        rows.append(measure(engine, model, name, chats, judge))
        save("chat.json", {"results": rows})
    engine.close()


if __name__ == "__main__":
    main()
