"""What the benchmarks through the engine share: an engine over a model, requests driven to their end, a reference.

No HTTP and no tokenizer. Times are taken where a caller takes them: from a list of token ids, which become an array as
`AsyncLLMEngine` makes them one, until the output is returned.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engram_kernels import Ops
from engram_runtime.engine import process
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.intake import packed
from engram_runtime.engine.loading import snapshot_service
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.executor.device.build import build_executor
from engram_runtime.executor.device.executor import DeviceExecutor
from engram_runtime.executor.memory import CacheRequest
from engram_runtime.executor.transfer import state_layout
from engram_runtime.models.base import CausalLM
from engram_runtime.snapshots.types import SnapshotConfig
from tests.bench.decode_judge import Judge, Verdict
from tests.bench.gpu_timing import MATMUL_TFLOPS

STEP_TOKENS = 8192


@dataclass
class Run:
    """One request as its caller saw it; seconds of `time.perf_counter`."""

    sent: float
    added: float = 0.0
    """When the engine's thread got it."""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    last: RequestOutput | None = None

    @property
    def ttft_ms(self) -> float:
        return (self.times[0] - self.sent) * 1e3

    @property
    def tpot_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Ask:
    """A request to be driven: greedy, exactly `new` tokens."""

    prompt: Sequence[int]
    new: int
    turn: TurnSpec | None = None


def make_engine(
    model: CausalLM,
    seqs: int,
    window: int,
    tokens: int,
    *,
    snapshots: SnapshotConfig | None = None,
    checkpoints: int | None = None,
    step_tokens: int = STEP_TOKENS,
) -> tuple[LLMEngine, DeviceExecutor]:
    """An engine with room for `tokens` tokens; `snapshots`: with the service behind it, as `engram serve` has it."""
    executor = build_executor(
        model,
        Ops.bind("cuda", torch.bfloat16),
        CacheRequest(seqs, window, kv_cache_tokens=tokens, checkpoint_slots=checkpoints),
        torch.device("cuda"),
        max_num_batched_tokens=step_tokens,
        utilization=None,
        record=True,
    )
    service = None
    if snapshots is not None:
        service = snapshot_service(snapshots, "0" * 64, state_layout(model.spec), executor)
    process.settle()  # as `engram serve` does
    config = EngineConfig("random", max_num_seqs=seqs, max_num_batched_tokens=step_tokens, seed=0, progress=False)
    engine = LLMEngine(
        config, executor, vocab_size=model.spec.vocab_size, snapshots=service, transfer=executor.transfer
    )
    return engine, executor


def random_tokens(model: CausalLM, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(model.spec.vocab_size) for _ in range(count)]


def drive(
    engine: LLMEngine, asks: Mapping[str, Ask], each_step: Callable[[float], None] | None = None
) -> dict[str, Run]:
    """All requests at once, until the last has ended. `each_step` is told when each step returned."""
    runs: dict[str, Run] = {}
    for name, ask in asks.items():
        run = runs[name] = Run(time.perf_counter())
        params = SamplingParams(temperature=0.0, max_tokens=ask.new, ignore_eos=True)
        prompt = packed(ask.prompt)
        run.added = time.perf_counter()
        engine.add_request(name, prompt, params, turn=ask.turn)
    while engine.has_unfinished_requests:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            run = runs[output.request_id]
            run.tokens += output.new_token_ids
            run.times += [now] * len(output.new_token_ids)
            run.last = output
        if each_step is not None:
            each_step(now)
        if engine.idle and not outputs:
            engine.wait(0.01)
    for name, ask in asks.items():
        if len(runs[name].tokens) != ask.new:
            raise RuntimeError(f"{name} has {len(runs[name].tokens)} tokens, not {ask.new}")
    return runs


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def rounded(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Mean, median and 95th percentile."""
    return {
        "mean": round(statistics.fmean(values), digits),
        "p50": round(statistics.median(values), digits),
        "p95": round(percentile(values, 0.95), digits),
    }


# The reference


def judged(judge: Judge, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """What a row says of its own soundness (see `decode_judge`), from answers of one length. RuntimeError when they are
    not sound."""
    each = [judge.verdict([prompt], [answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    ours, torchs = ([getattr(verdict, whose) for verdict in each] for whose in ("ours", "torch"))
    verdict = Verdict(*(math.sqrt(statistics.fmean(value * value for value in part)) for part in (ours, torchs)))
    if not verdict.is_sound:
        raise RuntimeError(f"greedy choices fall further behind those of fp32 than torch's own do: {verdict}")
    return {"behind_fp32": round(verdict.ours, 4), "torch_behind_fp32": round(verdict.torch, 4)}


# Floors


def prefill_floor_ms(model: CausalLM, tokens: int) -> float:
    """Products of a prompt over the card's matrix rate: layers for every token, attention, one row of logits. Of the
    last layer only keys and values, or the state's inputs, are needed of every token."""
    spec, config = model.spec, model.spec.config
    last = f"layers.{spec.num_layers - 1}."
    weights = 0.0
    for path, parameter in model.named_parameters():
        if parameter.dim() < 2 or "embed_tokens" in path or "lm_head" in path or "conv" in path:
            continue
        share = 1.0
        if path.endswith(("w_in", "w_out")):
            share = int(config["num_experts_per_tok"]) / parameter.shape[0]
        if path.startswith(last):
            unread = spec.num_q_heads * spec.head_dim
            if "in_proj" in path and spec.state is not None:
                unread = spec.state.ssm_shape[0] * spec.state.ssm_shape[1]  # the gate
            elif "qkv_proj" not in path:
                unread = parameter.shape[0]
            share = 1 - unread / parameter.shape[0]
        weights += parameter.numel() * share
    attending = spec.num_attention_layers - (spec.layer_types[-1] == "attention")
    attention = 2 * tokens * tokens * spec.num_q_heads * spec.head_dim * attending
    return (2 * tokens * weights + attention) / MATMUL_TFLOPS / 1e9


def against(row: dict[str, Any], figure: float, *, floor: float | None, bar: float | None, peer: float | None) -> None:
    """Add floor, bar and vLLM's figure to a row of times (smaller is better); RuntimeError below the floor."""
    if floor is not None and figure < floor:
        raise RuntimeError(f"{row}: {figure} is below the floor of {floor}: something was not computed")
    row.update(
        floor_ms=None if floor is None else round(floor, 3),
        percent_of_floor=None if floor is None else round(100 * floor / figure),
        bar=bar,
        met=None if bar is None else figure <= bar,
        vllm=peer,
    )
    print(row, flush=True)
