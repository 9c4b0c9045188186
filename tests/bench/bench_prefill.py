"""Prompts through the whole engine: time to the first token, many requests at once, the original lite_llama's protocol.

    make bench-gpu PART=prefill        (or: tests/bench/bench_prefill.py [--models Qwen3-0.6B,...] [--parts many])

Random weights of the published shapes. Per model: the time to the first token of prompts of 8,192 and 32,768 tokens
(chunks of 8,192), and the output rate of 128 requests at once (512 in, 128 out). For Qwen3-0.6B also what the original
lite-llama measures: batch 4, prompts of 25 tokens, 64 generated. Every prompt is new, so nothing is a prefix hit (the
counter of computed tokens is checked). Answers of two seeds are judged in this process by the same weights in fp32 (see
decode_judge). Beside each figure: its floor (products over the matrix rate), the bar and vLLM 0.26.0 on the
same kind of card. Results: prefill.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from engram_runtime.engine.core import LLMEngine
from engram_runtime.models.base import CausalLM
from tests.bench import bench_step
from tests.bench.decode_judge import Judge
from tests.bench.engine_runs import (
    Ask,
    against,
    drive,
    judged,
    make_engine,
    prefill_floor_ms,
    random_tokens,
)
from tests.bench.gpu_timing import COPY_TBS, save

LONG = (8192, 32768)
ROUNDS = {8192: 5, 32768: 3}
PARTS = ("first_token", "many", "seed_protocol")
WARM_UP = 2
"""Rounds of each kind before those that count: the first compiles, the second records."""
MANY, MANY_IN, MANY_OUT = 128, 512, 128
CHECKED = 900
"""Prompt tokens of the comparison with the reference: longer than a tile, and no multiple of anything."""
ANSWERS, ANSWER = 8, 64
"""Answers of that comparison and their tokens, as many as a row of bench_decode has judged: of 96 tokens the root mean
square of torch's own was 0.014 one day and 0.022 another."""
BAR_MS: dict[str, dict[int, float]] = {
    "Qwen3-0.6B": {8192: 34, 32768: 270},
    "Qwen3-8B": {8192: 205, 32768: 1220},
    "Llama-3.1-8B": {8192: 202, 32768: 1170},
    "Granite-4.0-H-tiny": {8192: 70, 32768: 250},
}
VLLM_MS: dict[str, dict[int, float]] = {
    "Qwen3-0.6B": {8192: 37.8, 32768: 277},
    "Qwen3-8B": {8192: 218, 32768: 1233},
    "Llama-3.1-8B": {8192: 214, 32768: 1183},
    "Granite-4.0-H-tiny": {8192: 103, 32768: 281},
}
MANY_BAR = {"Qwen3-0.6B": 23000, "Qwen3-8B": 7000, "Granite-4.0-H-tiny": 12000}
MANY_VLLM = {"Qwen3-0.6B": 19290, "Qwen3-8B": 6261, "Granite-4.0-H-tiny": 9081}


def checked(engine: LLMEngine, model: CausalLM, judge: Judge, seed: int) -> dict[str, float]:
    """Some prompts at once, and what is thought of their answers."""
    asks = {f"check{i}": Ask(random_tokens(model, CHECKED, seed + i), ANSWER) for i in range(ANSWERS)}
    runs = drive(engine, asks)
    return judged(judge, [ask.prompt for ask in asks.values()], [run.tokens for run in runs.values()])


def first_token(engine: LLMEngine, model: CausalLM, name: str, length: int) -> dict[str, Any]:
    times = []
    for number in range(ROUNDS[length] + WARM_UP):
        prompt = random_tokens(model, length, 1000 * length + number)
        before = engine.stats().prefilled_tokens
        run = drive(engine, {f"p{number}": Ask(prompt, 2)})[f"p{number}"]
        computed = engine.stats().prefilled_tokens - before
        if computed != length:
            raise RuntimeError(f"{computed} of {length} prompt tokens were computed")
        times.append(run.ttft_ms)
    figure = statistics.median(times[WARM_UP:])
    row = {"model": name, "prompt": length, "ttft_ms": round(figure, 2), "worst_ms": round(max(times[WARM_UP:]), 2)}
    floor = prefill_floor_ms(model, length)
    against(row, figure, floor=floor, bar=BAR_MS[name][length], peer=VLLM_MS[name][length])
    return row


def many(engine: LLMEngine, model: CausalLM, name: str) -> dict[str, Any]:
    """128 requests at once; the last of three rounds counts."""
    took: list[float] = []
    first = 0.0
    for number in range(WARM_UP + 1):
        asks = {
            f"m{number}-{i}": Ask(random_tokens(model, MANY_IN, 7_000_000 * (number + 1) + i), MANY_OUT)
            for i in range(MANY)
        }
        started = time.perf_counter()
        runs = drive(engine, asks)
        took.append(time.perf_counter() - started)
        first = statistics.fmean(run.ttft_ms for run in runs.values())
    seconds = took[-1]
    rate = MANY * MANY_OUT / seconds
    decode = bench_step._read_bytes(model, MANY, MANY_IN + MANY_OUT // 2) / COPY_TBS / 1e9 * MANY_OUT
    floor = decode + MANY * prefill_floor_ms(model, MANY_IN)
    if seconds * 1e3 < floor:
        raise RuntimeError(f"{seconds} s are below the floor of {floor} ms")
    bar = MANY_BAR.get(name)
    row = {
        "model": name, "requests": MANY, "in": MANY_IN, "out": MANY_OUT, "output_tokens_per_s": round(rate),
        "rounds_s": [round(each, 3) for each in took], "ttft_mean_ms": round(first, 1),
        "percent_of_floor": round(floor / seconds / 10), "bar": bar,
        "met": None if bar is None else rate >= bar, "vllm": MANY_VLLM.get(name),
    }  # fmt: skip
    print(row, flush=True)
    return row


def seed_protocol(engine: LLMEngine, model: CausalLM, name: str) -> dict[str, Any]:
    """Batch 4, prompts of 25 tokens, 64 generated, greedy: milliseconds per generated token, prefill included."""
    whole, steps = [], []
    for number in range(5 + WARM_UP):
        asks = {f"s{number}-{i}": Ask(random_tokens(model, 25, 31 * number + i), 64) for i in range(4)}
        runs = drive(engine, asks)
        whole.append((max(r.times[-1] for r in runs.values()) - min(r.sent for r in runs.values())) * 1e3 / 64)
        steps.append(statistics.median(runs[f"s{number}-0"].tpot_ms))
    figure = statistics.median(whole[WARM_UP:])
    floor = bench_step._read_bytes(model, 4, 25 + 32) / COPY_TBS / 1e9
    row: dict[str, Any] = {
        "model": name, "batch": 4, "prompt": 25, "out": 64, "ms_per_token": round(figure, 3),
        "step_ms": round(statistics.median(steps[WARM_UP:]), 3),
    }  # fmt: skip
    against(row, figure, floor=floor, bar=0.85, peer=2.49)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="Qwen3-0.6B,Qwen3-8B,Llama-3.1-8B,Granite-4.0-H-tiny")
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    parts = args.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts must be some of {', '.join(PARTS)}, got {args.parts!r}")
    results: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for name in args.models.split(","):
        with torch.no_grad():
            model = bench_step.build(name)
        # Room for every prompt of a part, so that none has to be evicted while it is timed.
        engine, _ = make_engine(model, MANY, 33_000, 140_000)
        judge = Judge(model, bench_step.CONFIGS[name](), 4096)
        checked(engine, model, judge, 1)
        for length in LONG if "first_token" in parts else ():
            results["first_token"].append(first_token(engine, model, name, length))
        if "many" in parts and name in MANY_BAR:
            results["many"].append(many(engine, model, name))
        if "seed_protocol" in parts and name == "Qwen3-0.6B":
            results["seed_protocol"].append(seed_protocol(engine, model, name))
        verdict = checked(engine, model, judge, 1001)
        print(name, verdict, flush=True)
        for rows in results.values():
            for row in rows:
                if row["model"] == name:
                    row.update(verdict)
        save("prefill.json", {"results": results})
        engine.close()
        del engine, model, judge
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
