"""The linear layers of a model as problems for the search: plain, gated, and the vocabulary projection in fp32.

In bf16, also for a model in fp16: both read the same bytes, and the table does not tell them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram_kernels.autotune.candidates import FP32_KINDS, KINDS, call, candidates
from engram_kernels.autotune.driver import Card
from engram_kernels.autotune.search import Case, Problem
from engram_kernels.gated_linear.kernel import Wide, without_plan
from engram_kernels.linear.kernel import Choice

TOLERANCE = 4e-3
"""Of bf16 results against fp32."""
COLD_BYTES = 320 << 20
"""Weights that the timed calls rotate over: several times the largest L2."""
MOST_COPIES = 128
"""Of a small layer: so many calls go into one graph."""


@dataclass(frozen=True, slots=True, order=True)
class Layer:
    """n outputs, k inputs. gated: weights of 2n rows, silu(gate) * up. wide: the result stays fp32. sizes: rows."""

    n: int
    k: int
    gated: bool = False
    wide: bool = False
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)

    @property
    def op(self) -> str:
        return "gated_linear" if self.gated else "linear"

    def key(self, size: int) -> str:
        return f"rows={size},n={self.n},k={self.k}"

    def candidates(self, size: int, card: Card) -> Sequence[Choice]:
        kinds = FP32_KINDS if self.wide else KINDS
        return candidates(size, self.n, self.k, self.gated, kinds, card.multiprocessors, card.hopper)

    def pointless(self, card: Card) -> str | None:
        return None

    def operands(self, device: torch.device, cold: bool) -> list[Tensor]:
        """Random weights, with `cold` as many as leave none of them in a cache."""
        rows = self.n * (2 if self.gated else 1)
        copies = max(2, min(MOST_COPIES, -(-COLD_BYTES // (rows * self.k * 2)))) if cold else 1
        return [torch.randn(rows, self.k, device=device, dtype=torch.bfloat16) * 0.05 for _ in range(copies)]

    def problem(self, size: int, operands: list[Tensor], card: Card) -> Problem[Choice]:
        """[size, k] through this layer."""
        device, gated = operands[0].device, self.gated
        x = torch.randn(size, self.k, device=device, dtype=torch.bfloat16)

        def weight(i: int) -> Tensor:
            return operands[i % len(operands)]

        def run(choice: Choice, i: int) -> Tensor:
            y = torch.empty(size, self.n, device=device, dtype=torch.float32 if self.wide else torch.bfloat16)
            call(choice, x, weight(i), y, gated)
            return y

        def expected() -> Tensor:
            product = x.float() @ weight(0).float().t()
            if not gated:
                return product
            return torch.nn.functional.silu(product[:, : self.n]) * product[:, self.n :]

        baseline: Callable[[int], object] = lambda i: torch.mm(x, weight(i).t())  # noqa: E731
        if gated:
            baseline = lambda i: without_plan(x, weight(i))  # noqa: E731
        elif self.wide:
            baseline = lambda i: torch.mm(x, weight(i).t(), out_dtype=torch.float32)  # noqa: E731
        case = Case(self.key(size), run, expected, max(len(operands), 8), baseline)
        found = self.candidates(size, card)
        return Problem(
            self.op, self.key(size), found, [case], TOLERANCE, describe, "before_us" if gated else "cublas_us"
        )


def describe(choice: Choice | Wide | None) -> dict[str, Any]:
    """A choice as a table entry (see `engram_kernels.linear.kernel.parse`, and `parse_wide` of gated_linear)."""
    if choice is None:
        return {"kind": "cublas"}
    fields = {name: int(value) for name, value in dataclasses.asdict(choice).items()}
    return {"kind": type(choice).__name__.lower(), **fields}
