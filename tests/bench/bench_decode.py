"""Decode through the whole engine: scheduler, device executor, results one step late; no HTTP, no tokenizer.

    PYTHONPATH=kernels:runtime:. python tests/bench/bench_decode.py [--models Qwen3-0.6B] [--batches 1,8,64]

Prompts of 512 random tokens, 128 generated greedily; the time per output token is the median interval between steps in
which every sequence decodes. Models without recurrent state decode the same once more with several steps a launch: the
interval between launches is divided by their steps, and the answers have to be the same. Once per model also the time
to the first token of a turn: 40 new tokens on a history that the device holds. Beside it: the floor (bytes that must
move over the copy rate), the bare graph of the model's step from bench_step, and the figure of vLLM 0.26.0 on the same
card (docs/performance.md). Every run is checked in the same process: four answers are judged by the same weights in
fp32, against what torch's own bf16 operators would choose (see decode_judge). A time below the floor, or an unsound
answer, is no result: it is reported and the exit status is 1. Results: decode.json.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import traceback
from typing import Any

import torch

from engram_kernels import Ops
from engram_runtime.engine import process
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.executor.device.build import build_executor
from engram_runtime.executor.device.executor import DeviceExecutor
from engram_runtime.executor.memory import CacheRequest
from engram_runtime.models.base import CausalLM
from tests.bench import bench_step
from tests.bench.decode_judge import Judge
from tests.bench.gpu_timing import COPY_TBS, save

PROMPT, NEW, WINDOW = 512, 128, 2048
HISTORY, TURN, TURNS = 1500, 40, 7
VLLM_MS = {
    "Qwen3-0.6B": {1: 2.24, 8: 2.56, 64: 3.66, 256: 6.55},
    "Qwen3-8B": {1: 5.15, 8: 5.54, 64: 6.85, 256: 14.0},
    "Llama-3.1-8B": {1: 4.89, 8: 5.08, 64: 6.57},
    "Granite-4.0-H-tiny": {1: 3.5, 8: 5.03, 64: 8.4, 256: 29.0},
}
MODELS = "Qwen3-0.6B,Qwen3-8B,Llama-3.1-8B,Granite-4.0-H-tiny,Granite-4.0-H-tiny" + bench_step.HALF_STATES
WARM = 4
"""Tokens of a run that only compiles and records."""
TOGETHER = 4
"""Decode steps a launch of the run that launches several."""
STEP_TOKENS = 8192


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def sampled(tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=tokens, ignore_eos=True)


class Refused(Exception):
    """A figure that was not earned."""


def executor_for(model: CausalLM, seqs: int) -> tuple[DeviceExecutor, float]:
    """An executor for that many sequences, and the seconds it took to build."""
    ops = Ops.bind("cuda", torch.bfloat16)
    started = time.perf_counter()
    executor = build_executor(
        model,
        ops,
        CacheRequest(seqs, WINDOW, kv_cache_tokens=max(2 * WINDOW, seqs * (PROMPT + 2 * NEW))),
        torch.device("cuda"),
        max_num_batched_tokens=STEP_TOKENS,
        utilization=None,
        record=True,
    )
    seconds = time.perf_counter() - started
    process.settle()  # as `engram serve` does
    return executor, seconds


def engine_over(executor: DeviceExecutor, model: CausalLM, seqs: int, steps: int = 1) -> LLMEngine:
    """An engine with `steps` decode steps a launch. It writes over what those made before it left in the executor's
    caches, so none of them is to be used again; closing one closes the executor."""
    config = EngineConfig(
        "random",
        max_num_seqs=seqs,
        max_num_batched_tokens=STEP_TOKENS,
        seed=0,
        progress=False,
        decode_steps_per_launch=steps,
    )
    return LLMEngine(config, executor, vocab_size=model.spec.vocab_size, transfer=executor.transfer)


def prompts_for(model: CausalLM, batch: int, seed: int) -> list[list[int]]:
    """Random tokens. No two of two successive seeds begin with the same token: what one run leaves in the prefix index
    is of no use to the next one, which so has the same steps."""
    rng = random.Random(seed)
    return [
        [2 * number + seed % 2, *(rng.randrange(model.spec.vocab_size) for _ in range(PROMPT - 1))]
        for number in range(batch)
    ]


def generate(
    engine: LLMEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[int]], list[float]]:
    """Answers, and milliseconds per token: the intervals between steps in which everybody decoded; with several decodes
    a launch, those between whole launches, divided by their steps."""
    steps = engine.config.decode_steps_per_launch
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, params[number])
    answers: list[list[int]] = [[] for _ in prompts]
    intervals, last = [], None
    while engine.has_unfinished_requests:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            answers[int(output.request_id[1:])] += output.new_token_ids
        # No sequence has more outputs than a launch has steps, so with this many each has all of them.
        everybody = len(outputs) == steps * len(prompts) and min(map(len, answers)) > 2
        if everybody and last is not None:
            intervals.append((now - last) * 1e3 / steps)
        last = now if everybody else None
    return answers, intervals


def turns(engine: LLMEngine, model: CausalLM) -> float:
    """Median milliseconds to the first token of a turn: 40 new tokens on a history that the device still holds."""
    rng = random.Random(9)
    tokens = [rng.randrange(model.spec.vocab_size) for _ in range(HISTORY)]
    times = []
    for number in range(TURNS):
        started, first = time.perf_counter(), 0.0
        engine.add_request(f"t{number}", tokens, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        while engine.has_unfinished_requests:
            for output in engine.step():
                first = first or (time.perf_counter() - started) * 1e3
                tokens = tokens + output.new_token_ids
        tokens = tokens + [rng.randrange(model.spec.vocab_size) for _ in range(TURN)]
        times.append(first)
    return statistics.median(times[3:])  # the first one is a prefill, the second one compiles, the third one records


def launched_together(
    engine: LLMEngine, warm: list[list[int]], prompts: list[list[int]], answers: list[list[int]]
) -> list[float]:
    """Milliseconds per token of greedy answers with several steps a launch; `answers` are those with one.

    Refused when they differ, or when no two launches of all sequences followed each other. The run over `warm` is as
    long as the measured one: in a large batch the first answers go on while later prompts are computed, and short ones
    would end before all of them decode together, which is the launch to be recorded.
    """
    params = [greedy(len(answer)) for answer in answers]
    generate(engine, warm, params)
    again, intervals = generate(engine, prompts, params)
    steps = engine.config.decode_steps_per_launch
    differ = sum(one != other for one, other in zip(answers, again, strict=True))
    if differ:
        raise Refused(f"{differ} of {len(answers)} answers are others with {steps} steps a launch")
    if not intervals:
        raise Refused(f"there were no two launches of {steps} steps in a row")
    return intervals


def p95(intervals: list[float]) -> float:
    return round(sorted(intervals)[int(0.95 * len(intervals))], 3)


def refuse_below(floor: float, tpot: float) -> None:
    if tpot < floor:
        raise Refused(f"{tpot} ms is below the floor of {floor} ms: something was not computed")


def measure(
    executor: DeviceExecutor, model: CausalLM, judge: Judge, name: str, batch: int, seqs: int
) -> dict[str, Any]:
    engine = engine_over(executor, model, seqs)
    warm, prompts = (prompts_for(model, batch, seed) for seed in (1, 2))
    # As long as the measured run, so that no shape of a step is new in that one: a step with prompts is recorded when
    # its shape comes for the second time, and one that is launched may round otherwise than one that is filled up to
    # its shape. Answers are compared below, with those of a run that finds everything recorded.
    generate(engine, warm, [greedy(NEW)] * batch)
    answers, intervals = generate(engine, prompts, [greedy(NEW)] * batch)
    if any(len(answer) != NEW for answer in answers):
        raise Refused(f"answers have {sorted(set(map(len, answers)))} tokens, not {NEW}")
    verdict = judge.verdict(prompts[:4], answers[:4])
    # Seeds of their own: with one seed flat rows draw the same tokens, which then reach the same few experts.
    generate(engine, prompts, [sampled(WARM, seed) for seed in range(batch)])
    _, drawn = generate(engine, prompts, [sampled(NEW, seed) for seed in range(batch)])
    floor = bench_step._read_bytes(model, batch, PROMPT + NEW // 2) / COPY_TBS / 1e9
    tpot = statistics.median(intervals)
    graph = bench_step.decode(model, name, batch, False)["ms"]
    row = {
        "model": name, "batch": batch, "prompt": PROMPT, "generated": NEW, "tpot_ms": round(tpot, 3),
        "sampled_tpot_ms": round(statistics.median(drawn), 3), "graph_ms": graph, "floor_ms": round(floor, 3),
        "percent_of_floor": round(100 * floor / tpot), "vllm_ms": VLLM_MS.get(name, {}).get(batch),
        "p95_ms": p95(intervals), "behind_fp32": round(verdict.ours, 4), "torch_behind_fp32": round(verdict.torch, 4),
    }  # fmt: skip
    print(row, flush=True)
    refuse_below(floor, tpot)
    if not verdict.is_sound:
        raise Refused(f"greedy choices fall further behind those of fp32 than torch's own do: {verdict}")
    if executor.steps_together >= TOGETHER:
        intervals = launched_together(engine_over(executor, model, seqs, TOGETHER), warm, prompts, answers)
        tpot = statistics.median(intervals)
        more = {f"launch{TOGETHER}_tpot_ms": round(tpot, 3), f"launch{TOGETHER}_p95_ms": p95(intervals)}
        print(more, flush=True)
        refuse_below(floor, tpot)
        row |= more
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batches", default="1,4,8,64,256")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    rows: list[dict[str, Any]] = []
    failed = 0
    for name in args.models.split(","):
        try:
            failed += run_model(name, batches, rows)
        except Exception:  # the other models' figures are worth having
            traceback.print_exc()
            failed += 1
        gc.collect()
        torch.cuda.empty_cache()
    sys.exit(1 if failed else 0)


def run_model(name: str, batches: list[int], rows: list[dict[str, Any]]) -> int:
    """Add a model's rows, saved one by one; the number of figures that were refused."""
    started = time.perf_counter()
    with torch.no_grad():
        model = bench_step.build(name, positions=4096)
    seqs = max(batches)
    executor, seconds = executor_for(model, seqs)
    print(f"{name}: executor built in {seconds:.1f} s, {executor.geometry.num_blocks} blocks", flush=True)
    judge = Judge(model, bench_step.CONFIGS[name](), 4096)
    turn = turns(engine_over(executor, model, seqs), model)
    print(f"{name}: first token of a turn {turn:.2f} ms", flush=True)
    once = {"build_seconds": round(seconds, 1), "turn_ttft_ms": round(turn, 2)}
    refused = 0
    for batch in batches:
        try:
            rows.append({**measure(executor, model, judge, name, batch, seqs), **once})
        except Refused as refusal:
            print(f"{name}, batch {batch}: {refusal}", flush=True)
            refused += 1
        save("decode.json", {"results": rows})
    executor.close()
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    return refused


if __name__ == "__main__":
    main()
