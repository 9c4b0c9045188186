"""How the rows of a step are sampled: three ways that record into a decode graph, and one for everything else.

A graph is fixed, so it holds the stages that need no lists: greedy, a plain draw, a draw with cuts. Penalties, biases,
forbidden tokens and reports of likely tokens have lengths that change from step to step; a step with any of them runs
its graph up to the hidden states and is sampled after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from engram_kernels.metadata import SamplingTensors
from engram_runtime.executor.device.inputs import DecodeInputs
from engram_runtime.executor.device.staging import Packer, float_bits
from engram_runtime.executor.device.tables import (
    FREQUENCY,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    HostRow,
    RowTables,
    SeenTokens,
)


class Way(Enum):
    """How a decode graph ends."""

    GREEDY = "greedy"
    DRAW = "draw"
    CUT = "cut"
    HIDDEN = "hidden"
    """With the hidden states: what follows cannot be recorded."""


def way_of(rows: Sequence[HostRow]) -> Way:
    """The cheapest way that serves all of these rows; with none of them nothing is sampled."""
    way = Way.GREEDY if rows else Way.HIDDEN
    for row in rows:
        s = row.sampling
        if s.needs_history or s.logit_bias or s.logprobs or row.generated < s.min_tokens:
            return Way.HIDDEN
        if s.temperature > 0:
            if s.top_k or s.top_p < 1.0 or s.min_p > 0.0:
                way = Way.CUT
            elif way is Way.GREEDY:
                way = Way.DRAW
    return way


def recorded_sampling(way: Way, inputs: DecodeInputs) -> SamplingTensors:
    """What the sampler of a decode graph gets."""
    if way is Way.GREEDY:
        return SamplingTensors()
    cuts = way is Way.CUT
    return SamplingTensors(
        temperature=inputs.floats[TEMPERATURE],
        seeds=inputs.ints[SEED],
        positions=inputs.sampled_at,
        top_k=inputs.ints[TOP_K] if cuts else None,
        top_p=inputs.floats[TOP_P] if cuts else None,
        min_p=inputs.floats[MIN_P] if cuts else None,
    )


class StepSampling:
    """The sampled rows of a step that is not (wholly) recorded: `pack` on the host, `build` on the device.

    rows: [R] row numbers, their host rows, where each one's last hidden state is, and the position it samples. When a
    row has a penalty, one more row is sampled whose entries pad the lists of seen tokens; nobody reads its token.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        rows: Sequence[HostRow],
        last: Sequence[int],
        positions: Sequence[int],
        spare_row: int,
        packer: Packer,
    ) -> None:
        self._asked = [row.sampling for row in rows]
        penalised = [index for index, row in enumerate(rows) if row.sampling.needs_history]
        self.count = len(rows)
        self._bound = max((len(rows[i].prompt_ids) + rows[i].generated + 1 for i in penalised), default=0)
        extra = [spare_row] if penalised else []
        self._numbers = packer.add([*numbers, *extra])
        self._last = packer.add([*last, *([0] if extra else [])])
        self._positions = packer.add([*positions, *([0] if extra else [])])
        self._penalised = packer.add(penalised) if penalised else None
        bias = [(i, token, value) for i, s in enumerate(self._asked) for token, value in s.logit_bias]
        self._bias: tuple[slice, slice, slice] | None = None
        if bias:
            index, token, value = zip(*bias, strict=True)
            self._bias = packer.add(index), packer.add(token), packer.add(float_bits(value))
        banned = [
            (i, token)
            for i, row in enumerate(rows)
            if row.generated < row.sampling.min_tokens
            for token in row.sampling.suppress_until_min
        ]
        self._banned: tuple[slice, slice] | None = None
        if banned:
            index, token = zip(*banned, strict=True)
            self._banned = packer.add(index), packer.add(token)

    def last(self, packer: Packer) -> Tensor:
        """[R] or [R + 1] rows of the hidden states."""
        return packer.take(self._last)

    def rows(self, packer: Packer) -> Tensor:
        """[R] or [R + 1] row numbers."""
        return packer.take(self._numbers)

    def build(self, packer: Packer, tables: RowTables, seen: SeenTokens | None) -> SamplingTensors:
        asked = self._asked
        numbers = packer.take(self._numbers)
        floats, ints = tables.floats[:, numbers], tables.ints[:, numbers]
        drawn = any(s.temperature > 0 for s in asked)
        listed = None
        if self._penalised is not None and seen is not None:
            places = packer.take(self._penalised)
            listed = seen.listed(numbers[places], places, self._bound, self.count)
        return SamplingTensors(
            temperature=floats[TEMPERATURE] if drawn else None,
            seeds=ints[SEED] if drawn else None,
            positions=packer.take(self._positions) if drawn else None,
            top_k=ints[TOP_K] if any(s.top_k for s in asked) else None,
            top_p=floats[TOP_P] if any(s.top_p < 1.0 for s in asked) else None,
            min_p=floats[MIN_P] if any(s.min_p > 0.0 for s in asked) else None,
            repetition_penalty=floats[REPETITION] if any(s.repetition_penalty != 1.0 for s in asked) else None,
            presence_penalty=floats[PRESENCE] if any(s.presence_penalty != 0.0 for s in asked) else None,
            frequency_penalty=floats[FREQUENCY] if any(s.frequency_penalty != 0.0 for s in asked) else None,
            seen=listed,
            logit_bias=self._bias and self._unpack_bias(packer, *self._bias),
            suppress=self._banned and (packer.take(self._banned[0]), packer.take(self._banned[1])),
            num_logprobs=max((s.logprobs or 0 for s in asked), default=0),
        )

    def _unpack_bias(self, packer: Packer, index: slice, token: slice, value: slice) -> tuple[Tensor, Tensor, Tensor]:
        values = packer.take(value).view(torch.float64).float()
        return packer.take(index), packer.take(token), values

    def penalised(self, packer: Packer) -> Tensor | None:
        """Places among the sampled rows whose tokens have to be counted."""
        return None if self._penalised is None else packer.take(self._penalised)
