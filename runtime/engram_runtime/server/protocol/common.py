"""Rules that every request follows: nulls are as if absent, unknown fields are refused, no silent conversions.

A field of the OpenAI API that this server cannot honour yet is declared `Refused`: it is documented, and refused by
name when a client sets it, because dropping it would change the answer without a word.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from engram_runtime.engine.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams

MAX_INT = 2**53 - 1  # integers above it do not survive JSON clients


MAX_BIASES = 4096


class Wire(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


def _refuse(_: Any) -> Any:
    raise ValueError("is not supported by this server yet")


Refused = Annotated[
    Any, BeforeValidator(_refuse), WithJsonSchema({"description": "Not supported yet: refused when it is set."})
]


def _stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > MAX_STOP_STRINGS:
        raise ValueError(f"must hold at most {MAX_STOP_STRINGS} strings, got {len(texts)}")
    if any(not 1 <= len(text) <= MAX_STOP_LENGTH for text in texts):
        raise ValueError(f"strings must have 1 to {MAX_STOP_LENGTH} characters")
    return texts


Stop = Annotated[
    list[str],
    BeforeValidator(_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


def _logit_bias(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError("must map token ids to numbers from -100 to 100")
    if len(value) > MAX_BIASES:
        raise ValueError(f"must hold at most {MAX_BIASES} token ids, got {len(value)}")
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10):
            raise ValueError(f"keys must be token ids, got {str(token)[:40]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"values must be numbers from -100 to 100, got {bias!r:.40} for token {token}")
    return {token: float(bias) for token, bias in value.items()}


LogitBias = Annotated[
    dict[str, float],
    BeforeValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
StringMap = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class StreamOptions(Wire):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ConversationFields(Wire):
    """How a request relates to what is remembered; also read from headers `x-engram-*`."""

    conversation_id: str | None = Field(None, description="Names the conversation; without it, it is derived.")
    branch_name: str | None = Field(None, description="Branch of the conversation; default main.")
    restore_from: str | None = Field(
        None, description='"conversation:turn" or a snapshot id. The request then carries the new messages only.'
    )
    auto_save: bool | None = Field(None, description="Leave a snapshot of this turn; default true (explicit: false).")
    stateful_mode: Literal["auto", "stateless", "explicit"] | None = Field(
        None, description="auto: find and save. stateless: neither. explicit: only what the request names."
    )
    delta: bool | None = Field(
        None, description="The request carries the new messages only; the base is the conversation's head."
    )


class SamplingFields(ConversationFields):
    """Fields that both generating calls share. Defaults are neutral."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_INT, description="0 or -1: off.")
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_N)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stop = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_INT)]] = Field(default_factory=list, max_length=256)
    min_tokens: int = Field(0, ge=0, le=MAX_INT)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: LogitBias = Field(default_factory=dict)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Accepted because they cannot change the answer.
    user: str | None = Field(None, max_length=MAX_STOP_LENGTH)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not available when stream is true")
        return self

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, n: int | None = None) -> SamplingParams:
        """The engine's view; ValueError names the field."""
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()} or None,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            n=self.n if n is None else n,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage
