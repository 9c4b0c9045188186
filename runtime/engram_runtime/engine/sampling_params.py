"""What a caller may ask of sampling, checked once at the edge so that nothing below has to.

Defaults are neutral (OpenAI's): no hidden repetition penalty, no repeat stop, and a greedy run is really greedy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request.

    `max_tokens=None` fills the model's window; `max_gen_len` is an alias of it. `temperature=0` is argmax (lowest id
    wins a tie). `top_k=0` is off. `seed=None` draws one per request. `stop` strings are matched on the decoded text,
    across token edges. `min_tokens` holds back end-of-sequence and stops, never the length caps. `logprobs=k` returns
    the sampled token's log-probability and the k best; they are of the raw model distribution. Raises ValueError
    naming the field.
    """

    max_tokens: int | None = None
    max_gen_len: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_gen_len is not None and self.max_tokens != self.max_gen_len:
            raise ValueError(f"max_gen_len is an alias of max_tokens, got {self.max_gen_len} and {self.max_tokens}")
        limit = self.max_tokens if self.max_tokens is not None else self.max_gen_len
        object.__setattr__(self, "max_tokens", limit)
        object.__setattr__(self, "max_gen_len", limit)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_lengths()
        self._check_distribution()
        self._check_stops()
        self._check_reports()

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be <= max_tokens ({self.max_tokens}), got {self.min_tokens}")
        _integer("n", self.n, 1, MAX_N)

    def _check_distribution(self) -> None:
        _number("temperature", self.temperature, 0.0)
        _number("top_p", self.top_p)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        _integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0.0:
            raise ValueError(f"repetition_penalty must be > 0, got {self.repetition_penalty}")
        if self.logit_bias is not None:
            for token, bias in self.logit_bias.items():
                _integer("logit_bias", token, 0)
                _number("logit_bias", bias, -100.0, 100.0)
            object.__setattr__(self, "logit_bias", dict(self.logit_bias) or None)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str):
                raise ValueError(f"stop must hold strings, got {type(text).__name__}")
            if not text or len(text) > MAX_STOP_LENGTH:
                raise ValueError(f"stop strings must have 1 to {MAX_STOP_LENGTH} characters, got {len(text)}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)

    def _check_reports(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have; ValueError names the field."""
        for name, tokens in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if token >= vocab_size:
                    raise ValueError(f"{name} holds token id {token}, the vocabulary has {vocab_size}")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    # bool is an int to Python and never what a caller means here.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f">= {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def _number(name: str, value: object, low: float | None = None, high: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if high is not None and low is not None and not low <= value <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value}")
    if low is not None and value < low:
        raise ValueError(f"{name} must be >= {low:g}, got {value}")
