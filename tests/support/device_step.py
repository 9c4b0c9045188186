"""A device executor without a device: steps "recorded" on the CPU, ops that never ask the host for a length.

A replay here runs the recorded closure again, so whatever a graph would have frozen (host numbers) is frozen too, and
whatever it would read again (device memory) is read again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram_kernels import Ops, Registry, StepMetadata
from engram_kernels.causal_conv1d.reference import causal_conv1d
from engram_kernels.paged_attention.reference import paged_attention
from engram_kernels.ssd_scan.reference import ssd_scan
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


def _real(meta: StepMetadata) -> tuple[StepMetadata, int]:
    """The metadata with host lengths read from its tensors, and the number of tokens that belong to somebody."""
    lengths = meta.query_start.diff().tolist()
    return replace(meta, query_lens_host=tuple(lengths), seq_lens_host=tuple(meta.seq_lens.tolist())), sum(lengths)


def _padded(y: Tensor, tokens: int) -> Tensor:
    """Rows of nobody are NaN: whoever reads one shows."""
    return torch.cat([y, y.new_full((tokens - y.shape[0], *y.shape[1:]), torch.nan)])


def attention_by_tensors(q: Tensor, kv: Tensor, meta: StepMetadata, scale: float) -> Tensor:
    real, tokens = _real(meta)
    return _padded(paged_attention(q[:tokens], kv, real, scale), q.shape[0])


def conv_by_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: StepMetadata) -> Tensor:
    real, tokens = _real(meta)
    return _padded(causal_conv1d(x[:tokens], weight, bias, state, real), x.shape[0])


def scan_by_tensors(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, state: Tensor, meta: StepMetadata,
    chunk_size: int, dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:  # fmt: skip
    real, n = _real(meta)
    y = ssd_scan(x[:n], dt[:n], A, B[:n], C[:n], D, bias, state, real, chunk_size, dt_limit)
    return _padded(y, x.shape[0])


def load_tiny(path: Path, *, state_dtype: str = "float32") -> tuple[CausalLM, Ops]:
    """A tiny checkpoint on the CPU in fp32 with ops that take lengths from the device alone."""
    registry = Registry.default().with_op("paged_attention", "by_tensors", attention_by_tensors)
    registry = registry.with_op("causal_conv1d", "by_tensors", conv_by_tensors)
    registry = registry.with_op("ssd_scan", "by_tensors", scan_by_tensors)
    ops = Ops.bind("cpu", torch.float32, registry=registry)
    return load_model(path, ops=ops, state_dtype=state_dtype), ops


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
