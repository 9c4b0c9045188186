"""The linear layers of a model as problems for the search: plain, gated, and the vocabulary projection in fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram_kernels.autotune.candidates import Choice, call, candidates
from engram_kernels.autotune.search import Problem
from engram_kernels.silu_and_mul.kernel import silu_and_mul

TOLERANCE = 4e-3
"""Of bf16 results against fp32."""
COLD_BYTES = 320 << 20
"""Weights that the timed calls rotate over: several times the largest L2."""


@dataclass(frozen=True, slots=True, order=True)
class Layer:
    """n outputs, k inputs. gated: weights of 2n rows, silu(gate) * up. wide: the result stays fp32."""

    n: int
    k: int
    gated: bool = False
    wide: bool = False

    @property
    def op(self) -> str:
        return "gated_linear" if self.gated else "linear"

    def key(self, rows: int) -> str:
        return f"rows={rows},n={self.n},k={self.k}"


def weights_of(layer: Layer, device: torch.device, cold_bytes: int = COLD_BYTES) -> list[Tensor]:
    """Random weights, as many as leave none of them in a cache."""
    rows = layer.n * (2 if layer.gated else 1)
    copies = max(2, min(24, -(-cold_bytes // (rows * layer.k * 2))))
    return [torch.randn(rows, layer.k, device=device, dtype=torch.bfloat16) * 0.05 for _ in range(copies)]


def problem(layer: Layer, rows: int, weights: list[Tensor]) -> Problem[Choice]:
    """[rows, k] through this layer."""
    device = weights[0].device
    x = torch.randn(rows, layer.k, device=device, dtype=torch.bfloat16)
    y = torch.empty(rows, layer.n, device=device, dtype=torch.float32 if layer.wide else torch.bfloat16)
    expected = x.float() @ weights[0].float().t()
    if layer.gated:
        expected = torch.nn.functional.silu(expected[:, : layer.n]) * expected[:, layer.n :]
    rotations = max(len(weights), 8)

    def weight(i: int) -> Tensor:
        return weights[i % len(weights)]

    baseline: Callable[[int], object] = lambda i: torch.mm(x, weight(i).t(), out=y)  # noqa: E731
    if layer.gated:
        baseline = lambda i: silu_and_mul(torch.mm(x, weight(i).t()))  # noqa: E731
    elif layer.wide:
        baseline = lambda i: torch.mm(x, weight(i).t(), out_dtype=torch.float32)  # noqa: E731
    return Problem(
        layer.op,
        layer.key(rows),
        candidates(rows, layer.n, layer.k, layer.gated),
        lambda choice, i: call(choice, x, weight(i), y, layer.gated),
        baseline,
        y,
        expected,
        TOLERANCE,
        rotations,
        describe,
    )


def describe(choice: Choice | None) -> dict[str, Any]:
    """A choice as a table entry (see `engram_kernels.linear.kernel.parse`)."""
    if choice is None:
        return {"kind": "cublas"}
    fields = {name: int(value) for name, value in dataclasses.asdict(choice).items()}
    return {"kind": type(choice).__name__.lower(), **fields}
