"""POST /v1/chat/completions: the request, with the shapes in which clients really send conversations back.

Clients echo our own replies as SDK objects or dumps: with nulls, `refusal`, `annotations`, `provider_specific_fields`.
Those fields say nothing to the model and are accepted; anything unknown is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from engram_runtime.engine.sampling_params import MAX_LOGPROBS
from engram_runtime.server.protocol.common import MAX_INT, Refused, SamplingFields, StringMap, Wire

MAX_PARTS = 10_000


class TextPart(Wire):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "content_part", "parts of type {kind} are not supported by this model, only text", {"kind": kind[:40]}
            )
        return value


class FunctionCall(Wire):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, ge=0, le=MAX_INT)


class Message(Wire):
    """One message. Content is text; a list of text parts is joined by line breaks."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Said to clients, not to the model.
    annotations: list[Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None
    thinking_blocks: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    refusal: Refused = None
    audio: Refused = None
    function_call: Refused = None
    images: list[Any] = Field(default_factory=list, max_length=0)

    @model_validator(mode="after")
    def _role_and_fields(self) -> Message:
        if self.role == "assistant":
            if self.content is None and not self.tool_calls:
                raise ValueError("an assistant message needs content or tool_calls")
        else:
            if self.content is None:
                raise ValueError(f"a {self.role} message needs content")
            if self.tool_calls:
                raise ValueError(f"tool_calls belong to assistant messages, not to role {self.role}")
        if isinstance(self.content, list) and not self.content:
            raise ValueError("content must not be an empty list")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class FunctionDefinition(Wire):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] = False


class Tool(Wire):
    type: Literal["function"]
    function: FunctionDefinition

    def shown(self) -> dict[str, Any]:
        """What the template sees."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _text_format(value: Any) -> Any:
    if value != {"type": "text"}:
        raise ValueError('is not supported by this server yet, except {"type": "text"}')
    return value


def _text_only(value: Any) -> Any:
    if value != ["text"]:
        raise ValueError('must be ["text"]')
    return value


def _tool_choice(value: Any) -> Any:
    if value not in ("none", "auto"):
        raise ValueError('is not supported by this server yet, except "none" and "auto"')
    return value


_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    [
        "chat_template",
        "messages",
        "conversation",
        "tools",
        "documents",
        "tokenize",
        "return_dict",
        "return_tensors",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "strftime_now",
        "raise_exception",
        "bos_token",
        "eos_token",
        "pad_token",
    ]
)


def _template_arguments(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    for name, item in value.items():
        if not name.isidentifier() or name.startswith("_") or name in _RESERVED_TEMPLATE_ARGUMENTS:
            raise ValueError(f"may not set {name[:40]!r}")
        if not isinstance(item, str | bool | int | float):
            raise ValueError(f"values must be strings, numbers or booleans, got {type(item).__name__} for {name}")
    return value


def check_size(value: Any) -> Any:
    """Counted before they are looked at: validating millions of empty parts would stop the event loop for seconds."""
    if isinstance(value, list):
        parts = len(value)
        for message in value if parts <= MAX_PARTS else ():
            if isinstance(message, dict):
                fields = (message.get("content"), message.get("tool_calls"))
                parts += sum(len(field) for field in fields if isinstance(field, list))
        if parts > MAX_PARTS:
            raise ValueError(f"must hold at most {MAX_PARTS} messages, content parts and tool calls in all")
    return value


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], BeforeValidator(check_size)] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT, description="Default: what is left of the window.")
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] = Field(default_factory=list, max_length=1024)
    tool_choice: Annotated[
        Literal["none", "auto"], BeforeValidator(_tool_choice), WithJsonSchema({"enum": ["none", "auto"]})
    ] = "auto"
    parallel_tool_calls: Literal[True] = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[
        dict[str, Any], BeforeValidator(_template_arguments), WithJsonSchema({"type": "object"})
    ] = Field(default_factory=dict)
    response_format: Annotated[
        Any,
        BeforeValidator(_text_format),
        WithJsonSchema({"type": "object", "properties": {"type": {"const": "text"}}}),
    ] = None
    modalities: Annotated[Any, BeforeValidator(_text_only), WithJsonSchema({"const": ["text"]})] = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    # Accepted because they cannot change the answer.
    metadata: StringMap = Field(default_factory=dict, max_length=16)
    prompt_cache_key: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)

    audio: Refused = None
    best_of: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    echo: Refused = None
    function_call: Refused = None
    functions: list[Any] = Field(default_factory=list, max_length=0)
    prediction: Refused = None
    prompt_cache_retention: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise ValueError("max_tokens and max_completion_tokens are the same limit and differ")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError("continue_final_message and add_generation_prompt exclude each other")
            if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
                raise ValueError("continue_final_message needs a last message of role assistant without tool_calls")
            if not self.messages[-1].text:
                raise ValueError("continue_final_message needs content in the last message")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def generation_prompt(self) -> bool:
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """What the template sees; `tool_choice: none` hides them."""
        if self.tool_choice == "none":
            return []
        return [tool.shown() for tool in self.tools]
