"""Reference sampler. Stages that no row uses are skipped, so a greedy row costs an argmax and one log-sum-exp.

Order: bias, penalties, suppression, temperature, top-k, top-p, min-p, then the arg-max of Gumbel-perturbed logits.
Cuts are thresholds on the value of a logit: tokens that tie at the cut are all kept, so the outcome does not depend on
the order in which some sort leaves equal values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram_kernels.metadata import SampleOutput, SamplingTensors
from engram_kernels.sample.philox import LEAST, uniform, uniform_row

_PREFIX = 1024
"""Top-p looks at this many of the largest logits before it sorts the whole vocabulary."""

_WORDS_AT_ONCE = 1 << 16
"""Random words drawn at a time on a CPU: those of one row fit a cache, those of a batch do not."""


def sample(logits: Tensor, s: SamplingTensors) -> SampleOutput:
    """logits [R, V] fp32, not modified -> chosen tokens and log-probabilities of the raw logits.

    Raises ValueError when a temperature is given without seeds and positions.
    """
    shaped = _shape(logits, s)
    token_ids = shaped.argmax(-1)
    if s.temperature is not None:
        if s.seeds is None or s.positions is None:
            raise ValueError("seeds and positions are needed when a temperature is given")
        rows = torch.nonzero(s.temperature > 0).flatten()
        if rows.numel():
            token_ids[rows] = _draw(shaped[rows], rows, s.temperature[rows], s.seeds[rows], s.positions[rows], s)
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, token_ids[:, None])[:, 0] - normaliser
    if not s.num_logprobs:
        return SampleOutput(token_ids, logprobs, None, None)
    top, top_ids = logits.topk(min(s.num_logprobs, logits.shape[-1]), dim=-1)
    return SampleOutput(token_ids, logprobs, top - normaliser[:, None], top_ids)


def _shape(logits: Tensor, s: SamplingTensors) -> Tensor:
    """Bias, penalties and suppression, on a copy when there is anything to change."""
    penalised = s.seen is not None and s.seen[0].numel() > 0
    if s.logit_bias is None and s.suppress is None and not penalised:
        return logits
    shaped = logits.clone()
    if s.logit_bias is not None:
        rows, ids, values = s.logit_bias
        shaped[rows, ids] += values
    if s.seen is not None and penalised:
        rows, ids, counts = s.seen
        values = shaped[rows, ids]
        if s.repetition_penalty is not None:
            factor = s.repetition_penalty[rows]
            values = torch.where(values > 0, values / factor, values * factor)
        if s.frequency_penalty is not None:
            values = values - s.frequency_penalty[rows] * counts
        if s.presence_penalty is not None:
            values = values - s.presence_penalty[rows] * (counts > 0)
        shaped[rows, ids] = values
    if s.suppress is not None:
        rows, ids = s.suppress
        shaped[rows, ids] = -torch.inf
    return shaped


def _draw(
    shaped: Tensor, rows: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, s: SamplingTensors
) -> Tensor:
    """Sample rows with a temperature above 0: shaped [n, V] -> [n] int64."""
    # Subtracting the maximum first keeps a tiny temperature from overflowing to inf - inf.
    scaled = (shaped - shaped.amax(-1, keepdim=True)) / temperature[:, None]
    floor = _floor(scaled, rows, s)
    if floor is None:
        vocab = scaled.shape[-1]
        rows_at_once = max(1, _WORDS_AT_ONCE // vocab) if scaled.device.type == "cpu" else scaled.shape[0]
        columns = (scaled, seeds[:, None], positions[:, None])
        for part, seed, position in zip(*(column.split(rows_at_once) for column in columns), strict=True):
            part += _gumbel(uniform_row(seed, position, vocab))
        return scaled.argmax(-1)
    # Few tokens usually survive a cut, and noise is addressed by token id: draw it only for those.
    row, ids = torch.nonzero(scaled >= floor[:, None], as_tuple=True)
    noisy = torch.full_like(scaled, -torch.inf)
    noisy[row, ids] = scaled[row, ids] + _gumbel(uniform(seeds[row], positions[row], ids))
    return noisy.argmax(-1)


def _gumbel(uniform: Tensor) -> Tensor:
    # A uniform number is never 1, which would give +inf.
    return uniform.clamp_(min=LEAST).log_().neg_().log_().neg_()


def _floor(scaled: Tensor, rows: Tensor, s: SamplingTensors) -> Tensor | None:
    """Smallest scaled logit [n] that survives top-k, top-p and min-p in each row; None when nothing is cut."""
    floor: Tensor | None = None
    vocab = scaled.shape[-1]
    top_k = None if s.top_k is None else torch.where(s.top_k[rows] > 0, s.top_k[rows], vocab).clamp(max=vocab)
    if top_k is not None and bool((top_k < vocab).any()):
        largest = scaled.topk(int(torch.where(top_k < vocab, top_k, 1).max()), dim=-1).values
        kth = largest.gather(-1, (top_k - 1).clamp(max=largest.shape[-1] - 1)[:, None])[:, 0]
        floor = torch.where(top_k < vocab, kth, -torch.inf)
    top_p = None if s.top_p is None else s.top_p[rows]
    if top_p is not None and bool((top_p < 1).any()):
        kept = scaled if floor is None else scaled.masked_fill(scaled < floor[:, None], -torch.inf)
        nucleus = torch.where(top_p < 1, _nucleus_floor(kept, top_p), -torch.inf)
        floor = nucleus if floor is None else torch.maximum(floor, nucleus)
    min_p = None if s.min_p is None else s.min_p[rows]
    if min_p is not None and bool((min_p > 0).any()):
        # The largest scaled logit is 0, so the bound on the probability is a bound on the logit.
        bound = min_p.log().clamp(max=0.0)
        floor = bound if floor is None else torch.maximum(floor, bound)
    return floor


def _nucleus_floor(kept: Tensor, top_p: Tensor) -> Tensor:
    """Smallest logit of the smallest set of largest logits whose probability reaches top_p; kept [n, V] has max 0."""
    mass = kept.exp().sum(-1) * top_p
    for size in (min(_PREFIX, kept.shape[-1]), kept.shape[-1]):
        largest = kept.topk(size, dim=-1).values
        reached = largest.exp().cumsum(-1) >= mass[:, None]
        if bool((reached.any(-1) | (top_p >= 1)).all()):
            break
    # Rounding of a sum over the whole vocabulary may leave top_p just short of 1 unreached: then nothing is cut.
    index = torch.where(reached.any(-1), reached.int().argmax(-1), largest.shape[-1] - 1)
    return largest.gather(-1, index[:, None])[:, 0]
