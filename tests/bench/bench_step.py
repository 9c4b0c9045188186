"""One whole model step on the GPU, without an engine around it: decode in a CUDA graph, prefill launched as it comes.

    PYTHONPATH=kernels:runtime:. python tests/bench/bench_step.py [--models Qwen3-0.6B,Qwen3-8B] [--profile]

Random weights in the real shapes of bars.md. A decode step is embedding, all layers, vocabulary logits and a greedy
choice, captured once at a context of 512; its floor is the bytes it must read over the copy rate. What the engine adds
(scheduling, detokenising, HTTP) is not in these figures. Results: step.json (see gpu_timing.save).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers

from engram_kernels import Ops, SamplingTensors, StepMetadata
from engram_kernels.sample.kernel import sample
from engram_runtime.layers.weights import Build
from engram_runtime.models.base import CausalLM
from engram_runtime.models.caches import Caches
from engram_runtime.models.registry import model_class
from engram_runtime.models.spec import item_size
from tests.bench.gpu_timing import COPY_TBS, save, time_us
from tests.support.kernel_cases import make_step

BF16 = torch.bfloat16
QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "Qwen3-0.6B": lambda: transformers.Qwen3Config(
        **QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen3-8B": lambda: transformers.Qwen3Config(
        **QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "Llama-3.1-8B": lambda: transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "Granite-4.0-H-tiny": lambda: transformers.GraniteMoeHybridConfig(
        vocab_size=100352, hidden_size=1536, intermediate_size=512, shared_intermediate_size=1024,
        num_hidden_layers=40, num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=131072,
        layer_types=["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        num_local_experts=64, num_experts_per_tok=6, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128,
        mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=256, embedding_multiplier=12.0, logits_scaling=6.0,
        residual_multiplier=0.22, attention_multiplier=0.0078125, tie_word_embeddings=True,
    ),
}  # fmt: skip


HALF_STATES = " (bf16 states)"
"""What is appended to a model's name for `--state-dtype bfloat16`."""
CONFIGS["Granite-4.0-H-tiny" + HALF_STATES] = CONFIGS["Granite-4.0-H-tiny"]


def build(name: str, device: str = "cuda", positions: int = 34000) -> CausalLM:
    """The model with random weights of about unit scale."""
    config = CONFIGS[name]()
    ops = Ops.bind(device if device != "meta" else "cpu", BF16)
    model = model_class(config.model_type)(
        config, Build(ops, torch.device(device), BF16), max_positions=positions,
        state_dtype="bfloat16" if name.endswith(HALF_STATES) else "float32",
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.device.type == "meta":
            continue
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        if parameter.dtype == torch.float32 and parameter.dim() == 1:
            parameter.uniform_(-2.0, -0.5)  # the decay rates of a recurrent layer
    return model.eval()


def caches(model: CausalLM, blocks: int, slots: int) -> Caches:
    spec = model.spec
    shape = (2, blocks, spec.num_kv_heads, 16, spec.head_dim)
    found = Caches(kv=[torch.randn(shape, device="cuda", dtype=BF16) for _ in range(spec.num_attention_layers)])
    if spec.state is not None:
        dtype = getattr(torch, spec.state.ssm_dtype)
        found.ssm = torch.zeros(slots, spec.state.num_layers, *spec.state.ssm_shape, device="cuda", dtype=dtype)
        found.conv = torch.zeros(slots, spec.state.num_layers, *spec.state.conv_shape, device="cuda", dtype=BF16)
    return found


def _read_bytes(model: CausalLM, batch: int, context: int) -> int:
    """Bytes a decode step must move: weights once (experts: those that a batch reaches), keys, values, states."""
    weights = 0
    for name, parameter in model.named_parameters():
        share = 1.0
        if name.endswith(("w_in", "w_out")):
            experts = parameter.shape[0]
            share = 1 - (1 - 6 / experts) ** batch
        if "embed_tokens" in name and not model.tied:
            share = 0.0
        weights += int(parameter.numel() * parameter.element_size() * share)
    spec = model.spec
    kv = batch * context * spec.num_attention_layers * 2 * spec.num_kv_heads * spec.head_dim * 2
    state = 0
    if spec.state is not None:
        heads, channels, size = spec.state.ssm_shape
        state = batch * 2 * spec.state.num_layers * heads * channels * size * item_size(spec.state.ssm_dtype)
    return weights + kv + state


@torch.no_grad()
def decode(model: CausalLM, name: str, batch: int, profile: bool) -> dict[str, Any]:
    context = 512
    meta, pool = make_step([(1, context)] * batch, device="cuda")
    state = caches(model, pool, batch + 2)
    ids = torch.randint(0, model.spec.vocab_size, (batch,), device="cuda")

    def step() -> torch.Tensor:
        return _choose(model, model(ids, meta, state))

    us = time_us([step], 60.0)
    floor = _read_bytes(model, batch, context) / COPY_TBS / 1e6
    row = {
        "model": name, "batch": batch, "context": context, "ms": round(us / 1e3, 3),
        "floor_ms": round(floor / 1e3, 3), "percent": round(100 * floor / us),
    }  # fmt: skip
    print(row, flush=True)
    if profile:
        _profile(step)
    return row


def _choose(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
    return sample(model.logits(hidden), SamplingTensors()).token_ids


def _profile(step: Any) -> None:
    """Kernels of one step by total time; launches are not overlapped here, so the sum exceeds a graph's time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    for event in sorted(trace.key_averages(), key=lambda e: -e.device_time_total)[:14]:
        print(f"   {event.device_time_total:9.1f} us {event.count:5d} x {event.key[:70]}", flush=True)


@torch.no_grad()
def prefill(model: CausalLM, name: str, tokens: int, history: int, profile: bool) -> dict[str, Any]:
    """One chunk of a single sequence, launched without a graph; wall time of the device, median of five."""
    meta: StepMetadata
    meta, pool = make_step([(tokens, history + tokens)], device="cuda")
    state = caches(model, pool, 3)
    ids = torch.randint(0, model.spec.vocab_size, (tokens,), device="cuda")
    end = torch.tensor([tokens - 1], device="cuda")

    def step() -> torch.Tensor:
        return _choose(model, model(ids, meta, state, end))

    if tokens <= 128:  # a turn's new tokens run as a graph, padded to a bucket
        us = time_us([step], 60.0)
        row = {"model": name, "tokens": tokens, "history": history, "ms": round(us / 1e3, 2), "graph": True}
        print(row, flush=True)
        return row
    for _ in range(2):
        step()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    row = {"model": name, "tokens": tokens, "history": history, "ms": round(sorted(times)[2], 2)}
    print(row, flush=True)
    if profile:
        _profile(step)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="Qwen3-0.6B,Qwen3-8B,Granite-4.0-H-tiny")
    parser.add_argument("--batches", default="1,4,8,64,256")
    parser.add_argument("--prefills", default="40@2500,8192@0,32768@0")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": []}
    for name in args.models.split(","):
        model = build(name)
        for batch in map(int, args.batches.split(",")):
            rows["decode"].append(decode(model, name, batch, args.profile and batch in (1, 64)))
            torch.cuda.empty_cache()
        for case in filter(None, args.prefills.split(",")):
            tokens, history = map(int, case.split("@"))
            rows["prefill"].append(prefill(model, name, tokens, history, args.profile and tokens <= 8192))
            torch.cuda.empty_cache()
        del model
        torch.cuda.empty_cache()
        save("step.json", {"results": rows})


if __name__ == "__main__":
    main()
