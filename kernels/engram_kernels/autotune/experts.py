"""The experts of a model as problems for the search: which of three ways, with which tiles, at each number of tokens.

The choice without a table is one of the candidates and the measure of the others. Tokens choose their experts evenly,
which a trained router does only roughly.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram_kernels.autotune.driver import Card
from engram_kernels.autotune.linear import COLD_BYTES
from engram_kernels.autotune.search import Case, Problem
from engram_kernels.experts.kernel import run
from engram_kernels.experts.plan import WIDEST, Choice, Direct, Grouped, Small, key, plan
from engram_kernels.experts.reference import experts as reference
from engram_kernels.launch import next_power_of_2

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
"""Against fp32; what is kept between the two products is rounded to the dtype."""
SHARED_MEMORY = 227 << 10
TILES = {  # bm: pairs (bn, bn_down), pairs (bk, stages), warps
    16: ([(32, 64), (16, 32), (32, 32), (64, 64), (32, 128)], [(128, 4), (64, 5), (128, 3), (256, 3)], (2, 4)),
    32: ([(32, 64), (64, 64), (64, 128)], [(64, 3), (64, 4), (128, 3)], (4,)),
    64: ([(64, 64), (64, 128), (128, 128)], [(64, 3), (64, 4), (128, 2)], (4, 8)),
    128: ([(64, 128), (128, 128), (128, 256)], [(64, 3), (64, 4)], (4, 8)),
}
REGISTERS = 160
"""Sums in fp32 that a thread may hold."""


def tiles(bm: int) -> list[tuple[int, int, int, int, int, int]]:
    """(bm, bn, bn_down, bk, stages, warps) that fit shared memory and registers."""
    columns, depths, warps = TILES[bm]
    return [
        (bm, bn, down, bk, stages, count)
        for (bn, down), (bk, stages), count in itertools.product(columns, depths, warps)
        if max(bm + 2 * bn, bm + down) * bk * stages * 2 <= SHARED_MEMORY
        and bm * max(2 * bn, down) // (32 * count) <= REGISTERS
    ]


@dataclass(frozen=True, slots=True)
class Experts:
    """count experts of width F = inner over rows of M = width, top of them a token, beside a shared one of S = shared
    (0: none). sizes: tokens."""

    count: int
    top: int
    width: int
    inner: int
    shared: int
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def op(self) -> str:
        return "experts"

    def key(self, size: int) -> str:
        return key(size, self.top, self.count, self.width, self.inner, self.shared, self.dtype)

    def candidates(self, size: int, card: Card) -> list[Choice]:
        """Today's choice first, then what suits the number of tokens that an expert gets."""
        pairs = size * self.top
        each = pairs / self.count
        found: list[Choice] = [self._today(size)]
        if size <= 16 and pairs <= 128 and self.width <= WIDEST:
            for bn, down, warps in itertools.product((2, 4, 8), (4, 8, 16), (4, 8)):
                held = max(2 * bn * next_power_of_2(self.width), down * next_power_of_2(self.inner)) // (32 * warps)
                if held <= REGISTERS:
                    found.append(Direct(bn, down, warps))
        if pairs <= 1024:
            found += [Small(*tile) for bm in ((16,) if each <= 8 else (16, 32)) for tile in tiles(bm)]
        if size >= 8:
            rows = (16,) if each <= 8 else (16, 32) if each <= 32 else (32, 64) if each <= 128 else (64, 128)
            found += [Grouped(*tile) for bm in rows for tile in tiles(bm)]
        return list(dict.fromkeys(found))

    def _today(self, size: int) -> Choice:
        return plan(size, self.top, self.count, self.width, self.inner, self.shared, self.dtype)

    def pointless(self, card: Card) -> str | None:
        return None

    def operands(self, device: torch.device, cold: bool) -> list[tuple[Tensor, ...]]:
        """w_in, w_out and, beside a shared expert, its two: as often as leaves none of them in a cache."""
        shapes: list[tuple[int, ...]] = [(self.count, 2 * self.inner, self.width), (self.count, self.width, self.inner)]
        if self.shared:
            shapes += [(2 * self.shared, self.width), (self.width, self.shared)]
        size = sum(2 * torch.Size(shape).numel() for shape in shapes)
        copies = min(16, -(-COLD_BYTES // size)) if cold else 1
        return [
            tuple(torch.randn(*shape, device=device, dtype=self.dtype) * shape[-1] ** -0.5 for shape in shapes)
            for _ in range(copies)
        ]

    def problem(self, size: int, operands: list[tuple[Tensor, ...]], card: Card) -> Problem[Choice]:
        """[size, width] through these experts: other tokens, with other experts, in each of some calls."""
        device = operands[0][0].device
        steps = []
        for _ in range(16 if size <= 64 else 4 if size <= 512 else 2):  # a few tokens read a few experts only
            scores, ids = torch.rand(size, self.count, device=device).topk(self.top, dim=-1)
            x = torch.randn(size, self.width, device=device, dtype=self.dtype)
            steps.append((x, scores.softmax(-1), ids))

        def shared(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
            return (weights[2], weights[3]) if self.shared else None

        def call(choice: Choice, i: int) -> Tensor:
            weights = operands[i % len(operands)]
            x, scores, ids = steps[i % len(steps)]
            return run(choice, x, weights[0], weights[1], scores, ids, None, shared(weights))

        def expected() -> Tensor:
            wide = [weight.float() for weight in operands[0]]
            x, scores, ids = steps[0]
            return reference(x.float(), wide[0], wide[1], scores, ids, None, shared(wide))

        case = Case(self.key(size), call, expected, max(len(steps), len(operands)))
        return Problem(
            self.op,
            self.key(size),
            self.candidates(size, card),
            [case],
            TOLERANCE[self.dtype],
            lambda choice: describe(choice or self._today(size)),
        )


def describe(choice: Choice) -> dict[str, Any]:
    """A choice as a table entry (see `engram_kernels.experts.plan.parse`)."""
    return {"kind": type(choice).__name__.lower(), **dataclasses.asdict(choice)}
