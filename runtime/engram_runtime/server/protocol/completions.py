"""POST /v1/completions, /tokenize and /detokenize: requests that carry text or token ids instead of messages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from engram_runtime.engine.sampling_params import MAX_LOGPROBS, MAX_N
from engram_runtime.server.protocol.chat import Message, Tool, check_size
from engram_runtime.server.protocol.common import MAX_INT, Refused, SamplingFields, Wire

Prompt = str | list[int]
MAX_PROMPTS = 256
MAX_TOKENS = 1 << 20


def _token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_TOKENS
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_INT for item in value)
    )


def _prompts(value: Any) -> list[Prompt]:
    """Every shape OpenAI takes, as a list of prompts: a string, strings, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of those, and not empty")
    if _token_ids(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must hold at most {MAX_PROMPTS} prompts, got {len(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, str) and not (_token_ids(item) and item):
            raise ValueError(f"prompt[{index}] must be a string or a list of token ids (non-negative integers)")
    return value


Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionRequest(SamplingFields):
    prompt: Prompts
    max_tokens: int = Field(16, ge=0, le=MAX_INT, description="0 only with echo: score the prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    echo: bool = False
    suffix: Refused = None

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be >= 1 unless echo is true")
        if self.best_of is not None:
            if self.best_of < self.n:
                raise ValueError(f"best_of must be >= n ({self.n}), got {self.best_of}")
            if self.stream and self.best_of > self.n:
                raise ValueError("best_of above n is not available when stream is true")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not available when stream is true")
        if (self.restore_from is not None or self.delta) and len(self.prompt) > 1:
            raise ValueError("prompt must be a single prompt with restore_from or delta")
        return self

    @property
    def candidates(self) -> int:
        """Sequences generated per prompt; the best `n` of them are returned."""
        return self.best_of or self.n


class TokenizeRequest(Wire):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], BeforeValidator(check_size)] | None = Field(None, min_length=1)
    tools: list[Tool] = Field(default_factory=list)
    add_special_tokens: bool = Field(True, description="For `prompt` only: a rendered template brings its own.")
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be given, and not both")
        return self


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=MAX_INT)]] = Field(max_length=MAX_TOKENS)
