"""The last token of each sequence of a step, for a last layer that computes nothing else.

Nobody reads the other tokens' final hidden states (unless prompt_logprobs asks for them), and no later layer does
either: of them the last layer owes its keys and values, or its recurrent state, and no more. Its attention, output
projection and feed-forward take one row a sequence: of a long prompt that is one layer of products and attention saved.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from engram_kernels import StepMetadata

OTHERS = 64
"""So many tokens beside the last ones pay for the launches that pick those out; with fewer, reading the last layer's
weights is what its time goes to."""


@dataclass(frozen=True, slots=True)
class LastTokens:
    """rows [S] int64: where each sequence's last new token is among the step's tokens. meta: the same sequences as
    decodes of that token alone."""

    rows: Tensor
    meta: StepMetadata

    @classmethod
    def of(cls, meta: StepMetadata, rows: Tensor, tokens: int) -> LastTokens | None:
        """None where the step's `tokens` are too few for it.

        Made before the step's first op, as everything in its metadata has to be. positions and slots stay those of
        all tokens: attention over keys that are in the cache already reads neither."""
        count = meta.num_sequences
        if tokens < count + OTHERS:
            return None
        alone = dataclasses.replace(
            meta,
            query_start=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
            num_decodes=count,
            max_query_len=1,
            query_lens_host=(1,) * count,
            chunk_tokens_host=None,
        )
        return cls(rows, alone)
