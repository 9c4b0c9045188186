"""The contract between the scheduler and an executor: one step, as plain data.

No tensors and no callbacks, so a plan can be logged, compared in a test, or sent to another rank. A decode names no
input token: the executor feeds the token it sampled last for that row. Thus a plan never depends on the result of the
step before it, and an executor may run one step ahead of the host.

Order inside a step: swap_out, swap_in, block_copies, state_loads, forward pass, state_saves, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What the executor really allocated, and what a token and a state cost in bytes of swap."""

    num_blocks: int
    block_size: int
    num_state_slots: int
    """0 for models without recurrent state. Any slot may run a sequence or hold a checkpoint."""
    kv_bytes_per_token: int
    state_bytes: int
    max_model_len: int

    @property
    def has_state(self) -> bool:
        return self.num_state_slots > 0


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling inputs of one row (one sequence), fixed for its life."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    suppress_until_min: tuple[int, ...] = ()
    """Token ids with probability zero while fewer than min_tokens were generated."""

    @property
    def needs_history(self) -> bool:
        """Penalties count tokens, so the row has to remember them."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class RowOpen:
    """A sequence enters the executor: `row` is free until a later plan closes it."""

    row: int
    sampling: RowSampling
    prompt_ids: Sequence[int]
    output_ids: tuple[int, ...] = ()
    """Tokens generated before a preemption."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one block or one state slot."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Move a sequence's KV (tokens [0, tokens)) and state between the pools and the host buffer named `handle`."""

    handle: int
    block_ids: Sequence[int]
    tokens: int
    state_slot: int | None


@dataclass(slots=True)
class SequencePlan:
    """New tokens of one sequence: positions [start, start + num_tokens). One is made per token: not frozen, which takes
    a third of the time; nobody changes it."""

    row: int
    start: int
    token_ids: Sequence[int] | None
    """None: one token, the one sampled last for this row."""
    block_ids: Sequence[int]
    """Block table covering start + num_tokens."""
    state_slot: int
    """Running slot; 0 when the model has no state."""
    sample: bool
    """The last new token's logits give the next token."""
    state_target: int | None = None
    """Slot that a decode leaves its new state in while `state_slot` keeps the one before; None: the state slot."""
    prompt_logprobs: bool = False
    """Report the log-probability of each prompt token that the new tokens predict."""

    @property
    def num_tokens(self) -> int:
        return 1 if self.token_ids is None else len(self.token_ids)

    @property
    def written_slot(self) -> int:
        return self.state_slot if self.state_target is None else self.state_target


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    sequences: tuple[SequencePlan, ...]
    """Decodes (one token, start > 0) first, then prefill chunks."""
    opens: tuple[RowOpen, ...] = ()
    closes: tuple[int, ...] = ()
    """Rows that ended; applied before `opens`, which may reuse them."""
    swap_out: tuple[Swap, ...] = ()
    swap_in: tuple[Swap, ...] = ()
    swap_drop: tuple[int, ...] = ()
    """Handles whose host buffer is no longer wanted."""
    block_copies: tuple[Copy, ...] = ()
    state_loads: tuple[Copy, ...] = ()
    """Checkpoint slot to running slot, before the forward pass."""
    state_saves: tuple[Copy, ...] = ()
    """Running slot to checkpoint slot, after the forward pass."""
    after: int = 0
    """A restore that may still be on its way into blocks and slots of this step (see `KVTransfer.write`); 0: none."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def reports_prompts(self) -> bool:
        """Hidden states of other tokens than each sequence's last one are read."""
        return any(sequence.prompt_logprobs for sequence in self.sequences)

    @property
    def is_empty(self) -> bool:
        return not (self.sequences or self.swap_out or self.swap_in or self.block_copies or self.state_loads)


@dataclass(slots=True)
class Sampled:
    """One sampled token; `logprob` and `top` are None unless asked for. Not frozen, as `SequencePlan`."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Log-probability of the prompt token at `position` given those before it."""

    position: int
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    sampled: dict[int, Sampled]
    """By row."""
    prompt_logprobs: dict[int, tuple[PromptLogprob, ...]]
    """By row; only rows that asked."""


MOST_STEPS_TOGETHER = 8
"""Decode steps that any executor may be asked to launch as one."""


class StepExecutor(Protocol):
    """Runs plans in order. `collect` returns results in the order of `submit`.

    A CPU executor computes inside `collect`; a GPU executor launches in `submit` and lets results arrive late.
    """

    @property
    def geometry(self) -> CacheGeometry: ...

    @property
    def steps_ahead(self) -> int:
        """How many submitted steps may be uncollected when another is submitted: 0 or 1."""

    @property
    def steps_together(self) -> int:
        """How many plans `submit_together` takes; 1: it is not to be called."""

    def submit(self, plan: StepPlan) -> None: ...

    def submit_together(self, plans: Sequence[StepPlan]) -> None:
        """Plans of the same sequences in the same order, all of which decode; the first may close rows, and there is
        nothing else in any of them. Each is collected by itself; their results may all come with the last one's."""

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...
