"""Turns what a caller asks into sequences the scheduler can run, or refuses it: nothing invalid gets past here."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Tokens

from engram_runtime.cache.runs import tokens_view
from engram_runtime.engine.detokenizer import Decoder
from engram_runtime.engine.request import Request
from engram_runtime.engine.sampling_params import SEED_MASK, SamplingParams
from engram_runtime.engine.sequence import Sequence
from engram_runtime.engine.transcript import Transcript
from engram_runtime.engine.turns import BOUNDARY_KINDS, TurnSpec
from engram_runtime.errors import CapacityError
from engram_runtime.executor.plan import CacheGeometry, RowSampling


def packed(prompt_ids: Tokens[int]) -> Tokens[int]:
    """A prompt as array("I"); as it is where that cannot be, which is an error once it is checked. An array is taken
    over as it is: whoever gives one does not change it any more.

    A long list takes a millisecond: who has a thread of its own does this before the engine's thread gets the request.
    """
    if isinstance(prompt_ids, array) and prompt_ids.typecode == "I":
        return prompt_ids
    try:
        return array("I", prompt_ids)
    except (TypeError, OverflowError, ValueError):
        return prompt_ids


class Intake:
    """Builds requests. `seed` makes the seeds of requests that name none reproducible."""

    def __init__(
        self,
        geometry: CacheGeometry,
        tokenizer: Decoder | None,
        vocab_size: int,
        eos_ids: frozenset[int],
        seed: int | None,
    ) -> None:
        self._geometry = geometry
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._random = random.Random(seed)
        self._count = 0

    def build(
        self,
        request_id: str,
        prompt_ids: Tokens[int],
        params: SamplingParams,
        turn: TurnSpec | None,
        priority: int,
        arrival: float,
    ) -> Request:
        """A foreground request. Raises ValueError naming the field, CapacityError when it can never fit."""
        prompt = self._checked_prompt(prompt_ids, self._geometry.max_model_len - 1)
        params.check_vocabulary(self._vocab_size)
        if params.stop and self._tokenizer is None:
            raise ValueError("stop needs a tokenizer, this engine has none")
        request = Request(request_id, params, prompt, arrival, turn)
        request.boundaries = self._boundaries(turn, len(prompt))
        room = self._geometry.max_model_len - len(prompt)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed & SEED_MASK
        for index in range(params.n):
            leader = request.sequences[0] if index else None
            sequence = self._sequence(request, self._row(params, (seed + index) & SEED_MASK), max_new, priority)
            sequence.leader = leader
            if leader is None and turn is not None and not turn.restore:
                sequence.use_prefix = False  # the index is where snapshots are found: stateless reads none of it
            request.sequences.append(sequence)
            request.transcripts.append(Transcript(self._tokenizer, prompt, params, self._eos_ids, max_new))
        if self._geometry.has_state:
            splits = {position for _, position in request.boundaries}
            if params.n > 1 and len(prompt) > 1:
                splits.add(len(prompt) - 1)  # where the other sequences go on from
            request.first.splits = tuple(sorted(splits))
            start = dict(request.boundaries).get("user_start")
            others = [position for kind, position in request.boundaries if kind != "user_start"]
            request.first.spare_split = start if start not in others and params.n == 1 else None
        request.unfinished = params.n
        return request

    def build_warm(
        self, request_id: str, prompt_ids: Tokens[int], turn: TurnSpec, boundary: str, arrival: float
    ) -> Request:
        """A background request: computes the whole prompt, samples nothing, captures `boundary` at its end."""
        if boundary not in BOUNDARY_KINDS:
            raise ValueError(f"boundary must be one of {', '.join(BOUNDARY_KINDS)}, got {boundary!r}")
        prompt = self._checked_prompt(prompt_ids, self._geometry.max_model_len - 1)
        request = Request(request_id, SamplingParams(), prompt, arrival, turn, warm_boundary=boundary)
        sequence = self._sequence(request, RowSampling(), 0, 0)
        sequence.background = True
        request.sequences.append(sequence)
        request.unfinished = 1
        return request

    def _sequence(self, request: Request, sampling: RowSampling, max_new: int, priority: int) -> Sequence:
        self._count += 1
        return Sequence(
            key=f"{self._count:016d}",
            tenant=request.tenant,
            prompt_ids=request.prompt_ids,
            sampling=sampling,
            max_new_tokens=max_new,
            arrival=request.arrival,
            priority=priority,
            # The logits of cached tokens are gone, and they are what was asked for.
            use_prefix=sampling.prompt_logprobs is None,
        )

    def _checked_prompt(self, prompt_ids: Tokens[int], most: int) -> array[int]:
        prompt = packed(prompt_ids)
        if not len(prompt):
            raise ValueError("prompt must hold at least one token, got none")
        if not isinstance(prompt, array) or int(tokens_view(prompt).max()) >= self._vocab_size:
            bad = next((t for t in prompt_ids if not isinstance(t, int) or not 0 <= t < self._vocab_size), None)
            raise ValueError(f"prompt holds {bad!r}, token ids must be integers below {self._vocab_size}")
        if len(prompt) > most:
            raise CapacityError(
                f"prompt has {len(prompt)} tokens, this engine serves at most {most} "
                f"(max_model_len {self._geometry.max_model_len} less one to generate)"
            )
        pool = self._geometry.num_blocks * self._geometry.block_size
        if len(prompt) > pool:
            raise CapacityError(f"prompt has {len(prompt)} tokens, the cache holds {pool}")
        return prompt

    def _boundaries(self, turn: TurnSpec | None, length: int) -> tuple[tuple[str, int], ...]:
        if turn is None:
            return ()
        for kind, position in turn.boundaries.items():
            if kind not in ("user_start", "history"):
                raise ValueError(f"boundaries may name user_start and history, got {kind!r}")
            if not 0 <= position < length:
                raise ValueError(f"boundaries: {kind} must be between 0 and {length - 1}, got {position}")
        if turn.answered is not None and not 0 <= turn.answered < length:
            raise ValueError(f"answered must be between 0 and {length - 1}, got {turn.answered}")
        for position in turn.candidates:
            if not 0 <= position <= length:
                raise ValueError(f"candidates must be between 0 and {length}, got {position}")
        # Position 0 is where everything begins: there is nothing to capture.
        return tuple((kind, position) for kind, position in turn.boundaries.items() if position > 0)

    def _row(self, params: SamplingParams, seed: int) -> RowSampling:
        suppressed = set(params.stop_token_ids)
        if not params.ignore_eos:
            suppressed |= self._eos_ids
        return RowSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple((params.logit_bias or {}).items()),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            min_tokens=params.min_tokens,
            suppress_until_min=tuple(sorted(t for t in suppressed if t < self._vocab_size))
            if params.min_tokens
            else (),
        )
