"""Per-sequence state of the sampler: what a row asked for and, where a penalty needs it, what it has seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from engram_kernels.metadata import SampleOutput, SamplingTensors
from engram_runtime.executor.plan import RowOpen, RowSampling, Sampled


class Row:
    """One open row. `last_token` is what the next decode feeds."""

    __slots__ = ("counts", "generated", "last_token", "prompt_ids", "sampling")

    def __init__(self, opened: RowOpen) -> None:
        self.sampling: RowSampling = opened.sampling
        self.prompt_ids = opened.prompt_ids
        self.generated = len(opened.output_ids)
        self.last_token = opened.output_ids[-1] if opened.output_ids else None
        self.counts: Counter[int] | None = None
        if opened.sampling.needs_history:
            self.counts = Counter(opened.output_ids)
            for token in opened.prompt_ids:
                self.counts.setdefault(token, 0)

    def feed(self) -> int:
        if self.last_token is None:
            raise RuntimeError("a decode was planned for a row that has sampled nothing")
        return self.last_token

    def append(self, token: int) -> None:
        self.last_token = token
        self.generated += 1
        if self.counts is not None:
            self.counts[token] += 1


def sampling_tensors(rows: Sequence[Row], positions: Sequence[int], device: torch.device) -> SamplingTensors:
    """Inputs of the sampler for R rows; `positions` [R] are those of the tokens about to be sampled.

    A stage that no row uses stays None and costs nothing.
    """
    asked = [row.sampling for row in rows]

    def column(values: list[float] | list[int], neutral: float, dtype: torch.dtype) -> Tensor | None:
        if all(value == neutral for value in values):
            return None
        return torch.tensor(values, dtype=dtype, device=device)

    temperature = column([s.temperature for s in asked], 0.0, torch.float32)
    drawn = temperature is not None
    return SamplingTensors(
        temperature=temperature,
        seeds=torch.tensor([s.seed for s in asked], dtype=torch.int64, device=device) if drawn else None,
        positions=torch.tensor(positions, dtype=torch.int64, device=device) if drawn else None,
        top_k=column([s.top_k for s in asked], 0, torch.int64),
        top_p=column([s.top_p for s in asked], 1.0, torch.float32),
        min_p=column([s.min_p for s in asked], 0.0, torch.float32),
        repetition_penalty=column([s.repetition_penalty for s in asked], 1.0, torch.float32),
        presence_penalty=column([s.presence_penalty for s in asked], 0.0, torch.float32),
        frequency_penalty=column([s.frequency_penalty for s in asked], 0.0, torch.float32),
        seen=_seen(rows, device),
        logit_bias=_logit_bias(asked, device),
        suppress=_suppress(rows, device),
        num_logprobs=max((s.logprobs or 0 for s in asked), default=0),
    )


def _seen(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    entries = [
        (index, token, count)
        for index, row in enumerate(rows)
        if row.counts is not None
        for token, count in row.counts.items()
    ]
    if not entries:
        return None
    index, token, count = (torch.tensor(part, dtype=torch.int64, device=device) for part in zip(*entries, strict=True))
    return index, token, count


def _logit_bias(asked: Sequence[RowSampling], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    entries = [(index, token, bias) for index, s in enumerate(asked) for token, bias in s.logit_bias]
    if not entries:
        return None
    index, token, bias = zip(*entries, strict=True)
    return (
        torch.tensor(index, dtype=torch.int64, device=device),
        torch.tensor(token, dtype=torch.int64, device=device),
        torch.tensor(bias, dtype=torch.float32, device=device),
    )


def _suppress(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor] | None:
    entries = [
        (index, token)
        for index, row in enumerate(rows)
        if row.generated < row.sampling.min_tokens
        for token in row.sampling.suppress_until_min
    ]
    if not entries:
        return None
    index, token = (torch.tensor(part, dtype=torch.int64, device=device) for part in zip(*entries, strict=True))
    return index, token


def sampled_tokens(rows: Sequence[Row], output: SampleOutput) -> list[Sampled]:
    """The sampler's tensors as plain data, one entry per row; reports only what the row asked for."""
    tokens, logprobs = output.token_ids.tolist(), output.logprobs.tolist()
    top_ids = output.top_ids.tolist() if output.top_ids is not None else None
    top_logprobs = output.top_logprobs.tolist() if output.top_logprobs is not None else None
    sampled = []
    for index, row in enumerate(rows):
        asked = row.sampling.logprobs
        top: tuple[tuple[int, float], ...] = ()
        if asked and top_ids is not None and top_logprobs is not None:
            top = tuple(zip(top_ids[index][:asked], top_logprobs[index][:asked], strict=True))
        sampled.append(Sampled(tokens[index], None if asked is None else logprobs[index], top))
    return sampled
