"""A device executor whose caches take what the card has left, after a real step has shown what a step needs.

What a step allocates is measured, not estimated: the heaviest steps the limits allow run once over caches just large
enough for them. What is left of the asked-for share of the card then becomes blocks and states.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import torch

from engram_kernels import Ops
from engram_kernels.metadata import PAGE
from engram_runtime.executor.device.executor import DeviceExecutor
from engram_runtime.executor.device.graphs import CudaRecorder
from engram_runtime.executor.device.mixed import FREE_TOKENS, worth_recording
from engram_runtime.executor.device.transfer import STAGING_BYTES
from engram_runtime.executor.memory import CacheRequest, plan_caches
from engram_runtime.executor.plan import CacheGeometry, RowOpen, RowSampling, SequencePlan, StepPlan
from engram_runtime.models.base import CausalLM

DEFAULT_UTILIZATION = 0.9
"""Share of the card's memory that weights, steps and caches take together."""
SLACK = 256 << 20
"""Left beside what was measured, in bytes: the allocator rounds up, and every recorded step costs the driver some."""


def build_executor(
    model: CausalLM,
    ops: Ops,
    request: CacheRequest,
    device: torch.device,
    *,
    max_num_batched_tokens: int,
    utilization: float | None,
    record: bool,
) -> DeviceExecutor:
    """Measure, size, allocate, record the largest decode. ValueError names the field that cannot be honoured."""
    share = DEFAULT_UTILIZATION if utilization is None else utilization
    window = min(request.max_model_len or model.spec.max_position_embeddings, model.spec.max_position_embeddings)
    step = step_bytes(model, ops, device, max_num_batched_tokens, request.max_num_seqs, window)
    spec = model.spec
    spare = PAGE * spec.kv_bytes_per_token() + spec.state_bytes()
    tables = 4 * request.max_num_seqs * (window // PAGE + 2)
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * share) - (total - free) - step - spare - tables - STAGING_BYTES - SLACK
    if budget <= 0:
        raise ValueError(
            f"gpu_memory_utilization {share} leaves no memory for caches: of {total} bytes {total - free} are in use "
            f"and a step needs {step}"
        )
    geometry = plan_caches(spec, replace(request, fill=True), budget)
    executor = DeviceExecutor(
        model,
        ops,
        geometry,
        device,
        max_num_seqs=request.max_num_seqs,
        recorder=CudaRecorder() if record else None,
        most_recorded=min(max_num_batched_tokens, max(FREE_TOKENS, worth_recording(model))),
    )
    executor.warm_up()
    return executor


def step_bytes(model: CausalLM, ops: Ops, device: torch.device, max_tokens: int, max_num_seqs: int, window: int) -> int:
    """Most bytes a step takes beside weights and caches; twice, since recorded steps keep their own, with room for a
    decode of every sequence beside a full step's prompts."""
    seqs = min(max_num_seqs, max_tokens)
    blocks = -(-max_tokens // PAGE) + seqs + -(-window // PAGE)
    spec = model.spec
    state_bytes = spec.state_bytes()
    geometry = CacheGeometry(blocks, PAGE, seqs if state_bytes else 0, spec.kv_bytes_per_token(), state_bytes, window)
    executor = DeviceExecutor(model, ops, geometry, device, max_num_seqs=seqs)
    peaks = []
    for plan in heaviest_plans(max_tokens, seqs, window, spec.vocab_size):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        executor.submit(plan)
        executor.collect()
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    executor.close()
    del executor
    gc.collect()
    torch.cuda.empty_cache()
    kept, *steps = peaks
    return kept + max(steps) + max(steps) * (max_tokens + seqs) // max_tokens


def heaviest_plans(max_tokens: int, seqs: int, window: int, vocab: int) -> Iterator[StepPlan]:
    """What penalties keep, a prompt that fills the budget, as many prompts as may run, a decode of each of them.

    Everything is sampled with every stage there is.
    """
    sampling = RowSampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20)
    longest = min(max_tokens, window - 1)

    def chunk(row: int, tokens: int, first_block: int) -> SequencePlan:
        blocks = tuple(range(first_block, first_block + tokens // PAGE + 1))
        return SequencePlan(row, 0, tuple(token % vocab for token in range(tokens)), blocks, row, True)

    yield StepPlan(0, (), opens=(RowOpen(0, sampling, ()),))
    yield StepPlan(1, (chunk(0, longest, 0),))
    each = max(1, min(max_tokens // seqs, window - 1))
    width = each // PAGE + 1
    chunks = tuple(chunk(row, each, row * width) for row in range(seqs))
    yield StepPlan(2, chunks, opens=tuple(RowOpen(row, sampling, ()) for row in range(seqs)), closes=(0,))
    yield StepPlan(3, tuple(SequencePlan(c.row, each, None, c.block_ids, c.row, True) for c in chunks))
