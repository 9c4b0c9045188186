"""Plain records that travel with a step: where its tokens live and how its rows are sampled.

Everything an op needs beyond its tensors is here, so that ops keep short signatures and a step is described once, not
once per layer. Tensors are on the device of the step; the `*_host` fields repeat values the planner already knows, so
no op has to wait for the device to learn a length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 16
"""Tokens in one block of the KV cache."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """One mixed batch of S sequences and T new tokens.

    Sequences are ordered: decodes first (exactly one new token and some history), then prefill chunks. The new tokens
    of sequence s are rows `query_start[s]:query_start[s + 1]` of every [T, ...] tensor.

    The tensors, and the states of the step's slots, are complete when the step's first op begins: kernels read them
    before they wait for their predecessor. So a first op (`embedding`) is launched like any other kernel, not as a
    dependent one, and no slot is updated twice within a step. A captured graph may be padded: a token without a place
    has slot -1, a decode without a sequence has length 0 and a state slot nobody uses, and a chunk may be
    shorter on the device than the host fields say: those are upper bounds, from which kernels take sizes of launches.
    """

    positions: Tensor
    """[T] int64, absolute position of each new token."""
    slots: Tensor
    """[T] int64, `block * PAGE + offset` where the token's keys and values go."""
    query_start: Tensor
    """[S + 1] int32, prefix sums of the numbers of new tokens."""
    seq_lens: Tensor
    """[S] int32, length of each sequence after this step."""
    block_tables: Tensor
    """[S, max_blocks] int32, blocks of each sequence in order; rows are padded with 0."""
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    state_slots: Tensor
    """[S] int64, running-state slot of each sequence; zeros when the model has no state."""
    has_state: Tensor
    """[S] bool, whether the slot holds a valid state (the sequence has history)."""
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    chunk_tokens_host: int | None = None
    """At least as many tokens as all chunks have together, where that is less than the sum of their bounds."""
    state_targets: Tensor | None = None
    """[S] int64, slot that a decode's new state is written to while `state_slots` keeps the old one; a chunk's is its
    state slot. None: every sequence's is."""

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens_host)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens_host)

    @property
    def decode_tokens(self) -> int:
        """Tokens that belong to decodes: rows `[:decode_tokens]`; the prefill chunks' rows follow."""
        return self.num_decodes

    def chunk_blocks(self, size: int) -> int:
        """At least as many blocks as the chunks need when each is cut into blocks of `size` tokens."""
        chunks = self.query_lens_host[self.num_decodes :]
        apart = sum(-(-count // size) for count in chunks)
        if self.chunk_tokens_host is None:
            return apart
        return min(apart, self.chunk_tokens_host // size + len(chunks))

    @property
    def written_slots(self) -> Tensor:
        """[S] int64, slots that the new states go to."""
        return self.state_slots if self.state_targets is None else self.state_targets

    def decodes(self) -> StepMetadata:
        """The decodes alone; describes rows `[:decode_tokens]` of the step's tensors."""
        return self._slice(0, self.num_decodes, num_decodes=self.num_decodes)

    def prefills(self) -> StepMetadata:
        """The prefill chunks alone, token offsets rebased to 0; describes rows `[decode_tokens:]`."""
        return self._slice(self.num_decodes, self.num_sequences, num_decodes=0)

    def _slice(self, first: int, last: int, *, num_decodes: int) -> StepMetadata:
        if first == 0 and last == self.num_sequences:
            return self
        query_lens = self.query_lens_host[first:last]
        seq_lens = self.seq_lens_host[first:last]
        start = sum(self.query_lens_host[:first])
        tokens = slice(start, start + sum(query_lens))
        return StepMetadata(
            positions=self.positions[tokens],
            slots=self.slots[tokens],
            query_start=self.query_start[first : last + 1] - start,
            seq_lens=self.seq_lens[first:last],
            block_tables=self.block_tables[first:last],
            num_decodes=num_decodes,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            state_slots=self.state_slots[first:last],
            has_state=self.has_state[first:last],
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
            chunk_tokens_host=self.chunk_tokens_host if last > self.num_decodes else None,
            state_targets=None if self.state_targets is None else self.state_targets[first:last],
        )


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How R rows of logits become R tokens. An optional field that is None is a stage no row uses, and costs nothing.

    Per-row tensors are [R]; a row that does not use a stage carries the neutral value named below. Sparse fields list
    (row, token id) pairs; a pair appears at most once in each of them.
    """

    temperature: Tensor | None = None
    """[R] fp32; 0 takes the largest logit (lowest id wins a tie). None: every row does."""
    seeds: Tensor | None = None
    """[R] int64; needed when a temperature is above 0."""
    positions: Tensor | None = None
    """[R] int64, position in its sequence of the token being sampled; needed when a temperature is above 0."""
    top_k: Tensor | None = None
    """[R] int64; 0 or >= V is off."""
    top_p: Tensor | None = None
    """[R] fp32 in (0, 1]; 1 is off."""
    min_p: Tensor | None = None
    """[R] fp32 in [0, 1]; 0 is off."""
    repetition_penalty: Tensor | None = None
    """[R] fp32 > 0; 1 is off. Applies to tokens of the prompt and of the output."""
    presence_penalty: Tensor | None = None
    """[R] fp32; 0 is off. Applies to tokens of the output."""
    frequency_penalty: Tensor | None = None
    """[R] fp32; 0 is off. Applies to tokens of the output, times their count."""
    seen: tuple[Tensor, Tensor, Tensor] | None = None
    """(rows [N] int64, ids [N] int64, output_counts [N]): every distinct token of prompt and output of the rows that
    use a penalty, with the number of times it was generated (0: it is only in the prompt)."""
    logit_bias: tuple[Tensor, Tensor, Tensor] | None = None
    """(rows [N] int64, ids [N] int64, values [N] fp32), added to the logits."""
    suppress: tuple[Tensor, Tensor] | None = None
    """(rows [N] int64, ids [N] int64) that must not be chosen, such as end-of-sequence before `min_tokens`."""
    num_logprobs: int = 0
    """How many of the most likely tokens to report beside the chosen one."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Chosen tokens and the model's own log-probabilities (of the raw logits, whatever shaped the choice)."""

    token_ids: Tensor
    """[R] int64."""
    logprobs: Tensor
    """[R] fp32, of the chosen tokens."""
    top_logprobs: Tensor | None
    """[R, num_logprobs] fp32, largest first; None when num_logprobs is 0."""
    top_ids: Tensor | None
    """[R, num_logprobs] int64."""
