"""A step whose results are on their way: host memory that is filled once the device has come so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engram_kernels.metadata import SampleOutput
from engram_runtime.executor.device.staging import Done, to_host
from engram_runtime.executor.device.tables import HostRow
from engram_runtime.executor.plan import PromptLogprob, Sampled, StepResult


@dataclass(slots=True)
class Scores:
    """Log-probabilities of the prompt tokens `targets`, the first of which is at `position`."""

    row: int
    position: int
    targets: Sequence[int]
    chosen: Tensor
    """[n] fp32."""
    values: Tensor
    """[n, asked] fp32, largest first, and their ids [n, asked]."""
    ids: Tensor

    def read(self) -> list[PromptLogprob]:
        best = zip(self.ids.tolist(), self.values.tolist(), strict=True)
        return [
            PromptLogprob(self.position + offset, token, logprob, tuple(zip(ids, values, strict=True)))
            for offset, (token, logprob, (ids, values)) in enumerate(
                zip(self.targets, self.chosen.tolist(), best, strict=True)
            )
        ]


@dataclass(slots=True)
class Pending:
    """`tokens` and the rest hold an entry at the place of each sampled row, and may hold others."""

    step: int
    rows: list[int] = field(default_factory=list)
    places: Sequence[int] = ()
    asked: list[int | None] = field(default_factory=list)
    """How many likely tokens each row wants reported; None: not even its own log-probability."""
    tokens: Tensor | None = None
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    scores: list[Scores] = field(default_factory=list)
    plan: Tensor | None = None
    """Host memory that the device may still have to read."""
    done: Done | None = None

    def fetch(
        self, numbers: Sequence[int], rows: Sequence[HostRow], output: SampleOutput, places: Sequence[int]
    ) -> None:
        """Start the copies of what these rows want to know; places: where each one is in the output."""
        asks = any(row.sampling.logprobs is not None for row in rows)
        self.expect(numbers, rows, to_host(output.token_ids), to_host(output.logprobs) if asks else None, places)
        if output.top_ids is not None and output.top_logprobs is not None:
            self.top_ids, self.top_logprobs = to_host(output.top_ids), to_host(output.top_logprobs)

    def expect(
        self,
        numbers: Sequence[int],
        rows: Sequence[HostRow],
        tokens: Tensor,
        logprobs: Tensor | None,
        places: Sequence[int],
    ) -> None:
        """The same where the device itself fills host memory: token ids [R] int64, log-probabilities [R] fp32."""
        self.rows, self.places = list(numbers), places
        self.asked = [row.sampling.logprobs for row in rows]
        self.tokens = tokens
        if any(asked is not None for asked in self.asked):
            self.logprobs = logprobs

    def result(self) -> StepResult:
        """Wait for the copies; the step as plain data."""
        if self.done is not None:
            self.done.wait()
        reports: dict[int, tuple[PromptLogprob, ...]] = {}
        for scores in self.scores:
            reports[scores.row] = (*reports.get(scores.row, ()), *scores.read())
        return StepResult(self.step, self._sampled(), reports)

    def _sampled(self) -> dict[int, Sampled]:
        if self.tokens is None:
            return {}
        tokens = self.tokens.tolist()
        if self.logprobs is None:
            return {row: Sampled(tokens[place]) for row, place in zip(self.rows, self.places, strict=True)}
        logprobs = self.logprobs.tolist()
        ids = self.top_ids.tolist() if self.top_ids is not None else []
        values = self.top_logprobs.tolist() if self.top_logprobs is not None else []
        sampled = {}
        for row, place, asked in zip(self.rows, self.places, self.asked, strict=True):
            top = tuple(zip(ids[place][:asked], values[place][:asked], strict=True)) if asked else ()
            sampled[row] = Sampled(tokens[place], None if asked is None else logprobs[place], top)
        return sampled
