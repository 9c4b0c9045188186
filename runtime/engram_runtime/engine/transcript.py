"""The caller's view of one sequence: its text so far, its log-probabilities, and when it has to end."""

from __future__ import annotations

from collections.abc import Sequence

from engram_runtime.engine.detokenizer import Decoder, Detokenizer
from engram_runtime.engine.outputs import FinishReason, TokenLogprobs
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.stop import StopStrings
from engram_runtime.executor.plan import PromptLogprob, Sampled


class Transcript:
    """Takes sampled tokens; says what is new for the caller and whether the sequence is over.

    `tokenizer` may be None: then there is no text, and no stop strings (the engine refuses them).
    """

    def __init__(
        self,
        tokenizer: Decoder | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        eos_ids: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else eos_ids
        self._max_new = max_new_tokens
        self._detokenizer = (
            Detokenizer(tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens)
            if tokenizer is not None
            else None
        )
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._prompt_length = len(prompt_ids)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._new_text = ""
        self._new_logprobs: list[TokenLogprobs] = []
        self._reported = 0
        self._prompt_reported = False

    def append(self, sampled: Sampled) -> bool:
        """Take one token; True when the sequence is over."""
        token, params = sampled.token_id, self._params
        self.token_ids.append(token)
        if sampled.logprob is not None:
            self._new_logprobs.append(TokenLogprobs(token, sampled.logprob, list(sampled.top)))
        count = len(self.token_ids)
        may_stop = count >= params.min_tokens
        stops_here = may_stop and (token in self._eos or token in params.stop_token_ids)
        detokenizer = self._detokenizer if not stops_here or params.include_stop_str_in_output else None
        if detokenizer is not None and self._show(detokenizer.push(token), active=may_stop):
            return True
        if stops_here:
            return self._finish("stop", None if token in self._eos else token)
        if count >= self._max_new:
            return self._finish("length", None)
        return False

    def _show(self, piece: str, *, active: bool) -> bool:
        shown, hit = self._stops.push(piece, active=active)
        self._new_text += shown
        if hit is None:
            return False
        self.finish_reason, self.stop_reason = "stop", hit
        return True

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> bool:
        # The last characters may complete a stop string even when the token count ended the sequence.
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        if not self._show(rest, active=len(self.token_ids) >= self._params.min_tokens):
            self._new_text += self._stops.flush()
            self.finish_reason, self.stop_reason = reason, stop_reason
        return True

    def end(self, reason: FinishReason) -> None:
        """End it from outside (abort, error), keeping the text so far."""
        if self.finish_reason is None:
            self._finish(reason, None)
            self.finish_reason, self.stop_reason = reason, None

    def add_prompt_logprobs(self, scores: Sequence[PromptLogprob]) -> None:
        # By position: a prefill that was started again reports some of them twice.
        for score in scores:
            self._prompt_logprobs[score.position] = TokenLogprobs(score.token_id, score.logprob, list(score.top))

    def take_delta(self) -> tuple[str, list[int], list[TokenLogprobs] | None]:
        """(text, token ids, log-probabilities) since the last call."""
        delta, self._new_text = self._new_text, ""
        self.text += delta
        tokens, self._reported = self.token_ids[self._reported :], len(self.token_ids)
        logprobs: list[TokenLogprobs] | None = None
        if self._params.logprobs is not None:
            logprobs, self._new_logprobs = self._new_logprobs, []
        return delta, tokens, logprobs

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry per prompt token, on the first call; None when not asked for."""
        if self._params.prompt_logprobs is None or self._prompt_reported:
            return None
        self._prompt_reported = True
        return [self._prompt_logprobs.get(position) for position in range(self._prompt_length)]
