"""Decode through the whole engine: scheduler, device executor, results one step late; no HTTP, no tokenizer.

    PYTHONPATH=kernels:runtime:. python tests/bench/bench_decode.py [--models Qwen3-0.6B] [--batches 1,8,64]

Prompts of 512 random tokens, 128 generated greedily; the time per output token is the median interval between steps in
which every sequence decodes. Once per model also the time to the first token of a turn: 40 new tokens on a history that
the device holds. Beside it: the floor (bytes that must move over the copy rate), the bare graph of the model's step
from bench_step, and the figure of vLLM 0.26.0 on the same card (docs/performance.md). Every run is checked in the same
process: four answers are judged by the same weights in fp32, against what torch's own bf16 operators would choose (see
decode_judge). A time below the floor, or an unsound answer, is no result: it is reported and the exit status is 1.
Results: decode.json.
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


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def sampled(tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=tokens, ignore_eos=True)


class Refused(Exception):
    """A figure that was not earned."""


def engine_over(model: CausalLM, seqs: int) -> tuple[LLMEngine, DeviceExecutor, float]:
    """An engine for that many sequences, and the seconds its executor took to build."""
    ops = Ops.bind("cuda", torch.bfloat16)
    started = time.perf_counter()
    executor = build_executor(
        model,
        ops,
        CacheRequest(seqs, WINDOW, kv_cache_tokens=max(2 * WINDOW, seqs * (PROMPT + 2 * NEW))),
        torch.device("cuda"),
        max_num_batched_tokens=8192,
        utilization=None,
        record=True,
    )
    seconds = time.perf_counter() - started
    process.settle()  # as `engram serve` does
    config = EngineConfig("random", max_num_seqs=seqs, max_num_batched_tokens=8192, seed=0, progress=False)
    engine = LLMEngine(config, executor, vocab_size=model.spec.vocab_size, transfer=executor.transfer)
    return engine, executor, seconds


def prompts_for(model: CausalLM, batch: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(model.spec.vocab_size) for _ in range(PROMPT)] for _ in range(batch)]


def generate(
    engine: LLMEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[int]], list[float]]:
    """Answers, and the milliseconds between steps in which everybody decoded."""
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, params[number])
    answers: list[list[int]] = [[] for _ in prompts]
    intervals, last = [], None
    while engine.has_unfinished_requests:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            answers[int(output.request_id[1:])] += output.new_token_ids
        everybody = len(outputs) == len(prompts) and min(map(len, answers)) > 2
        if everybody and last is not None:
            intervals.append((now - last) * 1e3)
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


def measure(engine: LLMEngine, model: CausalLM, judge: Judge, name: str, batch: int) -> dict[str, Any]:
    generate(engine, prompts_for(model, batch, 1), [greedy(WARM)] * batch)
    prompts = prompts_for(model, batch, 2)
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
        "p95_ms": round(sorted(intervals)[int(0.95 * len(intervals))], 3), "behind_fp32": round(verdict.ours, 4),
        "torch_behind_fp32": round(verdict.torch, 4),
    }  # fmt: skip
    print(row, flush=True)
    if tpot < floor:
        raise Refused(f"{tpot} ms is below the floor of {floor} ms: something was not computed")
    if not verdict.is_sound:
        raise Refused(f"greedy choices fall further behind those of fp32 than torch's own do: {verdict}")
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
    engine, executor, seconds = engine_over(model, max(batches))
    print(f"{name}: executor built in {seconds:.1f} s, {executor.geometry.num_blocks} blocks", flush=True)
    judge = Judge(model, bench_step.CONFIGS[name](), 4096)
    turn = turns(engine, model)
    print(f"{name}: first token of a turn {turn:.2f} ms", flush=True)
    once = {"build_seconds": round(seconds, 1), "turn_ttft_ms": round(turn, 2)}
    refused = 0
    for batch in batches:
        try:
            rows.append({**measure(engine, model, judge, name, batch), **once})
        except Refused as refusal:
            print(f"{name}, batch {batch}: {refusal}", flush=True)
            refused += 1
        save("decode.json", {"results": rows})
    engine.close()
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    return refused


if __name__ == "__main__":
    main()
