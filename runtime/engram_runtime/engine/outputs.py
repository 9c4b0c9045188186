"""What a caller receives: one `RequestOutput` per sequence and step, cumulative text beside the delta."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from engram_runtime.engine.turns import TurnReport

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probability of one token under the raw model distribution, and the best alternatives."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Wall-clock seconds since the epoch; None until it happened."""

    arrival: float
    first_token_time: float | None = None
    finish_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """State of one sequence after a step. One is made per token: not frozen, which takes a third of the time.

    `index` tells the sequences of n > 1 apart. `text` never ends in half a character nor in the beginning of a stop
    string; `delta` is what `text` gained. `stop_reason` is the stop string or the token id that ended it.
    `logprobs` and `new_token_ids` cover the tokens of this delta only, `token_ids` all generated so far.
    `prompt_logprobs` (first output only) has one entry per prompt token, None for the first.
    """

    request_id: str
    index: int = 0
    delta: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    turn: TurnReport | None = None
    """Set once the request has finished, on the output that carries `finish_reason`."""
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class Collector:
    """Joins the outputs of many steps: `delta`, `new_token_ids` and `logprobs` then cover the whole sequence."""

    def __init__(self) -> None:
        self._logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self._prompt_logprobs: dict[tuple[str, int], list[TokenLogprobs | None]] = {}
        self.finished: dict[tuple[str, int], RequestOutput] = {}
        """By request id and index."""

    def add(self, output: RequestOutput) -> None:
        key = output.request_id, output.index
        if output.logprobs is not None:
            self._logprobs.setdefault(key, []).extend(output.logprobs)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[key] = output.prompt_logprobs
        if output.finished:
            self.finished[key] = replace(
                output,
                delta=output.text,
                new_token_ids=list(output.token_ids),
                logprobs=self._logprobs.pop(key, None),
                prompt_logprobs=self._prompt_logprobs.pop(key, None),
            )
