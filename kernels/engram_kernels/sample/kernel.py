"""Sampling on the GPU: penalties, cuts, Gumbel noise and log-probabilities, without waiting for the device.

A row is spread over many programs, because 64 rows of 152k logits are few rows but much to read: one launch finds
maxima and log-sums per chunk, one perturbs and takes the best of each chunk, one puts the chunks together. Cuts add the
passes of `cut.py`, only when the step has a row that asks for them; chunks whose largest logit is cut draw nothing. The
noise is the reference's: Philox-4x32-10 keyed by the seed, its counter made of vocabulary id and position, and depends
on nothing else; what top-p keeps depends on sums, whose order is that of chunks.
Measured on an H200 (tests/bench/bench_kernels.py), 152k logits, us at 1 / 64 / 256 rows: greedy 4 / 15 / 43, with noise
8 / 49 / 169, with top-k, top-p and min-p 40 / 140 / 458, with top-p alone, where thousands to tens of thousands
survive, 43 / 237 to 266 / 816 to 943.
Sources: Gumbel-max sampling; vLLM's in-kernel noise; Salmon et al. 2011 for Philox.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engram_kernels.launch import dependent_launch, next_power_of_2
from engram_kernels.metadata import SampleOutput, SamplingTensors
from engram_kernels.sample import cut
from engram_kernels.sample.philox import LEAST, RUN

CHUNK = 2048

BIAS, PENALTIES, SUPPRESS = 0, 1, 2


@triton.jit(do_not_specialize=["count"])
def _edit(
    logits, rows, ids, values, repetition, frequency, presence, count, V,
    MODE: tl.constexpr, REP: tl.constexpr, FREQ: tl.constexpr, PRES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Change the listed (row, id) pairs of logits in place: add values, penalise by counts, or forbid."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = i < count
    row = tl.load(rows + i, mask=keep, other=0).to(tl.int64)
    at = logits + row * V + tl.load(ids + i, mask=keep, other=0)
    if MODE == 0:
        value = tl.load(at, mask=keep, other=0.0) + tl.load(values + i, mask=keep, other=0.0)
    elif MODE == 1:
        value = tl.load(at, mask=keep, other=0.0)
        times = tl.load(values + i, mask=keep, other=0).to(tl.float32)
        if REP:
            factor = tl.load(repetition + row, mask=keep, other=1.0)
            value = tl.where(value > 0, value / factor, value * factor)
        if FREQ:
            value -= tl.load(frequency + row, mask=keep, other=0.0) * times
        if PRES:
            value -= tl.load(presence + row, mask=keep, other=0.0) * tl.where(times > 0, 1.0, 0.0)
    else:
        value = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(at, value, mask=keep)


@triton.jit
def _survey(
    raw, shaped, tops, top_ids, raw_tops, raw_sums, V,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SAME: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the chunk's largest shaped logit and its id; maximum and sum of exp of the raw logits."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    at = row.to(tl.int64) * V + v
    value = tl.load(raw + at, mask=v < V, other=float("-inf"))
    top = tl.max(value, 0)
    slot = row * CHUNKS + chunk
    tl.store(raw_tops + slot, top)
    tl.store(raw_sums + slot, tl.sum(tl.exp(value - tl.maximum(top, -1e30)), 0))
    if not SAME:
        value = tl.load(shaped + at, mask=v < V, other=float("-inf"))
        top = tl.max(value, 0)
    tl.store(tops + slot, top)
    tl.store(top_ids + slot, chunk * CHUNK + tl.argmax(value, 0, tie_break_left=True))


@triton.jit
def _draw(
    shaped, tops, temperature, seeds, positions, min_p, cuts, drawn, drawn_ids, V,
    MIN_P: tl.constexpr, CUT: tl.constexpr, RUN: tl.constexpr, LEAST: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk) of a row with a temperature: the chunk's largest perturbed logit that no cut removed. All
    four words of a Philox counter are used, for ids RUN apart (see `philox.uniform`)."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = row * CHUNKS + chunk
    t = tl.load(temperature + row)
    if t > 0.0:
        top = cut.chunk_top(tops, row, chunk, t, CHUNKS, CP)
        alive = True
        if CUT:
            alive = cut.key_of(top) <= tl.load(cuts + row)
        if MIN_P:
            alive = alive & (top >= tl.minimum(tl.log(tl.load(min_p + row)), 0.0))
        best = float("-inf")
        best_id = chunk * CHUNK
        if alive:
            tl.static_assert(CHUNK % (4 * RUN) == 0)
            c = tl.arange(0, CHUNK // 4)
            counter = chunk * (CHUNK // 4) + c
            uniform = tl.rand4x(tl.load(seeds + row), (tl.load(positions + row).to(tl.int64) << 32) | counter)
            most = tl.full((CHUNK // 4,), float("-inf"), tl.float32)
            ids = chunk * CHUNK + c // RUN * (4 * RUN) + c % RUN  # of nothing but -inf the lowest, too
            for word in tl.static_range(4):
                v = chunk * CHUNK + c // RUN * (4 * RUN) + word * RUN + c % RUN
                scaled = cut.scaled_logits(shaped, tops, row, v, V, t, CHUNKS, CP)
                keep = v < V
                if CUT:
                    keep = keep & (cut.key_of(scaled) <= tl.load(cuts + row))
                if MIN_P:
                    keep = keep & (scaled >= tl.minimum(tl.log(tl.load(min_p + row)), 0.0))
                u = tl.maximum(uniform[word], LEAST)
                noisy = tl.where(keep, scaled - tl.log(-tl.log(u)), float("-inf"))
                better = noisy > most  # of equal ones the lower id
                ids = tl.where(better, v, ids)
                most = tl.where(better, noisy, most)
            best = tl.max(most, 0)
            best_id = tl.min(tl.where(most == best, ids, V), 0)
        tl.store(drawn + slot, best)
        tl.store(drawn_ids + slot, best_id)


@triton.jit
def _finish(
    raw, tops, top_ids, raw_tops, raw_sums, drawn, drawn_ids, temperature, tokens, logprobs, normalisers, V,
    DRAW: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): put the chunks together."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    c = tl.arange(0, CP)
    live = c < CHUNKS
    slot = row * CHUNKS + c
    peak = tl.load(raw_tops + slot, mask=live, other=float("-inf"))
    most = tl.max(peak, 0)
    total = tl.sum(tl.load(raw_sums + slot, mask=live, other=0.0) * tl.exp(peak - most), 0)
    normaliser = most + tl.log(total)
    values = tl.load(tops + slot, mask=live, other=float("-inf"))
    # NaN logits (a diverged model) may leave no best: any token will do, an address outside the row will not.
    best = tl.minimum(tl.argmax(values, 0, tie_break_left=True), CHUNKS - 1)
    token = tl.load(top_ids + row * CHUNKS + best)
    if DRAW:  # noqa: SIM102 - the inner test is made on the GPU, the outer one when the kernel is compiled
        if tl.load(temperature + row) > 0.0:
            values = tl.load(drawn + slot, mask=live, other=float("-inf"))
            best = tl.minimum(tl.argmax(values, 0, tie_break_left=True), CHUNKS - 1)
            token = tl.load(drawn_ids + row * CHUNKS + best)
    token = tl.minimum(token, V - 1)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(raw + row.to(tl.int64) * V + token) - normaliser)
    tl.store(normalisers + row, normaliser)


def sample(logits: Tensor, s: SamplingTensors) -> SampleOutput:
    """logits [R, V] fp32, not modified; as the reference. Raises ValueError for a temperature without seeds."""
    rows, vocab = logits.shape
    logits = logits.contiguous()
    if s.temperature is not None and (s.seeds is None or s.positions is None):
        raise ValueError("seeds and positions are needed when a temperature is given")
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    normalisers = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        _choose(logits, _shaped(logits, s), s, tokens, logprobs, normalisers)
    if not s.num_logprobs:
        return SampleOutput(tokens, logprobs, None, None)
    top, top_ids = logits.topk(min(s.num_logprobs, vocab), dim=-1)
    return SampleOutput(tokens, logprobs, top - normalisers[:, None], top_ids)


def _shaped(logits: Tensor, s: SamplingTensors) -> Tensor:
    """The logits after bias, penalties and suppression: a copy when there is anything to change."""
    penalised = s.seen is not None and s.seen[0].numel() > 0
    if s.logit_bias is None and s.suppress is None and not penalised:
        return logits
    shaped = logits.clone()
    if s.logit_bias is not None:
        _launch_edit(shaped, *s.logit_bias, BIAS, s)
    if s.seen is not None and penalised:
        _launch_edit(shaped, *s.seen, PENALTIES, s)
    if s.suppress is not None:
        _launch_edit(shaped, *s.suppress, s.suppress[1], SUPPRESS, s)
    return shaped


def _launch_edit(shaped: Tensor, rows: Tensor, ids: Tensor, values: Tensor, mode: int, s: SamplingTensors) -> None:
    count = rows.numel()
    if not count:
        return
    penalties = (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
    used = [mode == PENALTIES and penalty is not None for penalty in penalties]
    _edit[(-(-count // 256),)](
        shaped, rows, ids, values, *[shaped if penalty is None else penalty for penalty in penalties], count,
        shaped.shape[1], mode, *used, 256, num_warps=2,
    )  # fmt: skip


def _choose(
    raw: Tensor, shaped: Tensor, s: SamplingTensors, tokens: Tensor, logprobs: Tensor, normalisers: Tensor
) -> None:
    rows, vocab = raw.shape
    chunks = -(-vocab // CHUNK)
    padded = next_power_of_2(chunks)
    pdl = dependent_launch(raw)
    kwargs = {"launch_pdl": True} if pdl else {}
    tops, raw_tops, raw_sums, drawn = torch.empty(4, rows, chunks, dtype=torch.float32, device=raw.device)
    top_ids, drawn_ids = torch.empty(2, rows, chunks, dtype=torch.int32, device=raw.device)
    _survey[(rows, chunks)](
        raw, shaped, tops, top_ids, raw_tops, raw_sums, vocab, CHUNK, chunks, shaped is raw, pdl, num_warps=4, **kwargs
    )
    temperature = s.temperature
    if temperature is not None and s.seeds is not None and s.positions is not None:
        cuts = _find_cuts(shaped, tops, temperature, s.top_k, s.top_p)
        _draw[(rows, chunks)](
            shaped, tops, temperature, s.seeds, s.positions, tops if s.min_p is None else s.min_p,
            tops if cuts is None else cuts, drawn, drawn_ids, vocab, s.min_p is not None, cuts is not None, RUN,
            LEAST, CHUNK, chunks, padded, pdl, num_warps=4, **kwargs,
        )  # fmt: skip
    _finish[(rows,)](
        raw, tops, top_ids, raw_tops, raw_sums, drawn, drawn_ids, tops if temperature is None else temperature, tokens,
        logprobs, normalisers, vocab, temperature is not None, chunks, padded, pdl, num_warps=4, **kwargs,
    )  # fmt: skip


def _find_cuts(
    shaped: Tensor, tops: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor | None:
    """[R] int32: logits with larger keys are cut by top-k or top-p; None when the step asks for neither."""
    if top_k is None and top_p is None:
        return None
    rows, vocab = shaped.shape
    chunks = tops.shape[1]
    pdl = dependent_launch(shaped)
    kwargs = {"launch_pdl": True} if pdl else {}
    device = shaped.device
    counts = torch.empty(rows, chunks, cut.LEVELS, dtype=torch.int32, device=device)
    masses = torch.empty(rows, chunks, cut.LEVELS, dtype=torch.float32, device=device)
    ints = torch.empty(rows, 4, dtype=torch.int32, device=device)
    floats = torch.empty(rows, 2, dtype=torch.float32, device=device)
    kept = torch.empty(rows, cut.CAP, dtype=torch.float32, device=device)
    found = torch.empty(rows, dtype=torch.int32, device=device)
    wanted = (temperature, tops if top_k is None else top_k, tops if top_p is None else top_p)
    asked = (shaped, tops, *wanted)
    flags = (top_k is not None, top_p is not None)
    whole = (chunks, next_power_of_2(chunks), pdl)
    shape = (CHUNK, *whole)
    cut.census[(rows, chunks)](*asked, counts, masses, vocab, *flags, *shape, num_warps=4, **kwargs)
    cut.plan[(rows,)](*wanted, counts, masses, ints, floats, vocab, *flags, cut.CAP, *whole, num_warps=4, **kwargs)
    slice_counts = counts
    if top_p is not None:
        slice_counts, slice_masses = torch.empty_like(counts), torch.empty_like(masses)
        tables = (slice_counts, slice_masses)
        cut.refine[(rows, chunks)](*asked, ints, *tables, vocab, flags[0], *shape, num_warps=4, **kwargs)
        cut.plan_slice[(rows,)](*wanted, *tables, ints, floats, vocab, flags[0], *whole, num_warps=4, **kwargs)
    cut.compact[(rows, chunks)](
        *asked, counts, slice_counts, ints, kept, vocab, *flags, cut.CAP, *shape, num_warps=4, **kwargs
    )
    cut.solve[(rows,)](*asked, ints, floats, kept, found, vocab, *flags, cut.CAP, *whole, num_warps=8, **kwargs)
    return found
