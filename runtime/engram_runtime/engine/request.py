"""A request: what the caller asked for, its one or more sequences, and what is reported about it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engram_runtime.engine.outputs import RequestMetrics, RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.sequence import Sequence
from engram_runtime.engine.transcript import Transcript
from engram_runtime.engine.turns import TurnReport, TurnSpec


@dataclass(frozen=True, slots=True)
class Identity:
    """Which turn of which conversation a request is, and the snapshot it continues."""

    conversation_id: str
    branch_name: str
    turn_number: int
    parent_id: str | None = None
    prompt_key: str = ""
    """Names the turn's prompt within this process: a turn that asks the very same again shares it."""


@dataclass(slots=True)
class RestoreOutcome:
    """What came of looking for a snapshot. `position` 0: nothing was restored."""

    position: int = 0
    gpu_position: int = 0
    """What the GPU tier already had."""
    tier: str | None = None
    bytes: int = 0
    milliseconds: float = 0.0
    error: str | None = None
    head_turn: int = 0
    """Where the conversation stands, as far as its stored head could be read although nothing was restored."""


@dataclass(slots=True, eq=False)
class Request:
    """`boundaries` are (kind, position) inside the prompt that are captured as prefill passes them."""

    request_id: str
    params: SamplingParams
    prompt_ids: array[int]
    arrival: float
    turn: TurnSpec | None = None
    warm_boundary: str | None = None
    """Set for background requests: captured when the whole prompt is computed."""
    boundaries: tuple[tuple[str, int], ...] = ()
    sequences: list[Sequence] = field(default_factory=list)
    transcripts: list[Transcript] = field(default_factory=list)
    restore: RestoreOutcome | None = None
    identity: Identity | None = None
    captured: set[str] = field(default_factory=set)
    """Kinds among `boundaries` that prefill has passed."""
    boundary: str | None = None
    """The last one captured, and the id of its durable snapshot, if it has one."""
    snapshot_id: str | None = None
    report: TurnReport | None = None
    first_token_time: float | None = None
    last_token_time: list[float] = field(default_factory=list)
    finish_time: float | None = None
    metrics: RequestMetrics | None = None
    """The times as they were last reported; one object for all outputs between two changes."""
    unfinished: int = 0

    @property
    def tenant(self) -> str:
        return self.turn.tenant if self.turn is not None else "default"

    @property
    def first(self) -> Sequence:
        return self.sequences[0]

    def output(self, index: int) -> RequestOutput:
        """What sequence `index` gained since the last output."""
        transcript = self.transcripts[index]
        delta, new_tokens, logprobs = transcript.take_delta()
        finished = transcript.finish_reason is not None
        metrics = self.metrics
        if metrics is None or finished or metrics.first_token_time != self.first_token_time:
            metrics = self.metrics = RequestMetrics(self.arrival, self.first_token_time, self.finish_time)
        # By position: one is made per token, and names take as long as all the rest.
        return RequestOutput(
            self.request_id,
            index,
            delta,
            transcript.text,
            transcript.token_ids[:],
            new_tokens,
            transcript.finish_reason,
            transcript.stop_reason,
            logprobs,
            transcript.take_prompt_logprobs(),
            len(self.prompt_ids),
            self.sequences[0].prefix_tokens,
            self.report if finished else None,
            metrics,
        )
