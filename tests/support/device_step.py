"""A device executor without a device: steps "recorded" on the CPU, attention that never asks the host for a length.

A replay here runs the recorded closure again, so whatever a graph would have frozen (host numbers) is frozen too, and
whatever it would read again (device memory) is read again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram_kernels import Ops, Registry, StepMetadata
from engram_kernels.metadata import PAGE
from engram_kernels.paged_attention.reference import paged_attention
from engram_runtime.executor.device.executor import DeviceExecutor
from engram_runtime.executor.device.graphs import Step
from engram_runtime.executor.executor import Executor
from engram_runtime.executor.memory import CacheRequest, plan_caches
from engram_runtime.loader.model import load_model
from engram_runtime.models.base import CausalLM


class Again:
    """Records a step by keeping it; counts what was recorded."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, step: Step) -> Step:
        self.recorded += 1
        return step


def attention_by_tensors(q: Tensor, kv: Tensor, meta: StepMetadata, scale: float) -> Tensor:
    """Decodes from device tensors alone, as a kernel inside a graph has to; other steps by the reference."""
    if meta.num_decodes < meta.num_sequences:
        return paged_attention(q, kv, meta, scale)
    longest = int(meta.seq_lens.max())
    position = torch.arange(longest)
    blocks = meta.block_tables[:, position // PAGE].long()
    keys, values = (plane[blocks, :, position % PAGE].transpose(1, 2) for plane in kv)
    groups = q.shape[1] // kv.shape[2]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("shd,shnd->shn", q, keys) * scale
    visible = position < meta.seq_lens[:, None]
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return torch.einsum("shn,shnd->shd", weights, values.masked_fill(~visible[:, None, :, None], 0.0))


def load_tiny(path: Path) -> tuple[CausalLM, Ops]:
    """A tiny checkpoint on the CPU in fp32 with that attention."""
    registry = Registry.default().with_op("paged_attention", "by_tensors", attention_by_tensors)
    ops = Ops.bind("cpu", torch.float32, registry=registry)
    return load_model(path, ops=ops), ops


def make_executor(
    kind: str, model: CausalLM, ops: Ops, *, seqs: int, window: int, tokens: int, checkpoints: int = 16
) -> Any:
    """kind: "plain" (the host's executor), "launched" or "recorded"."""
    geometry = plan_caches(model.spec, CacheRequest(seqs, window, tokens, seqs, checkpoints), 1 << 30)
    device = torch.device("cpu")
    if kind == "plain":
        return Executor(model, ops, geometry, device)
    recorder = Again() if kind == "recorded" else None
    return DeviceExecutor(model, ops, geometry, device, max_num_seqs=seqs, recorder=recorder)
