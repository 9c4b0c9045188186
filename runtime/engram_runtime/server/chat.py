"""From messages to a prompt: one render of the checkpoint's own template, and the token positions that memory needs.

Everything here runs in a worker thread under a time limit, never on the event loop: a 200-message conversation takes
tens of milliseconds. The template runs in transformers' sandboxed Jinja environment; a template from a request is never
run. Boundaries are a service to the cache: a template that raises on a probe costs the boundary, never the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from tokenizers import Tokenizer

from engram_runtime.server.encoding import IncrementalEncoder
from engram_runtime.server.errors import ApiError, invalid
from engram_runtime.server.positions import Encoded, Encoding, PrefixFinder, anchor_candidates
from engram_runtime.server.protocol.chat import Message

# They begin with different letters, so the ids part right where the content begins.
PROBES = ("Hi there", "What is 7")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as the template sees it. `messages` are canonical dicts (see `canonical`)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    generation_prompt: bool = True
    continue_final: bool = False
    date: datetime | None = None
    """What `strftime_now` shows; None: now."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. Positions are token counts, each below len(ids)."""

    encoded: Encoded
    boundaries: dict[str, int]
    candidates: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        return self.encoded.ids


def canonical(message: Message) -> dict[str, Any]:
    """One spelling per meaning: text content, no nulls, tool arguments as an object where they are one."""
    result: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                **({"id": call.id} if call.id else {}),
            }
            for call in message.tool_calls
        ]
    return result


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class ChatRenderer:
    """Renders and tokenises for one checkpoint; thread-safe.

    on_boundary_error(boundary) is called when a template refuses a probe.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_model_len: int,
        workers: int = 2,
        timeout_seconds: float = 30.0,
        on_boundary_error: Callable[[str], None] = lambda boundary: None,
    ) -> None:
        self._hf = tokenizer
        # A copy of our own: the wrapper switches truncation and padding on the shared one, which is not thread-safe.
        serialised = tokenizer.backend_tokenizer.to_str()
        self._backend = Tokenizer.from_str(serialised)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._separators = frozenset(
            index
            for index, token in self._backend.get_added_tokens_decoder().items()
            if not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        )
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else json.dumps(template) if template else ""
        self.tokenizer_digest = hashlib.sha256(serialised.encode()).hexdigest()
        self.template_digest = hashlib.sha256(self._template.encode()).hexdigest()
        self.prints_date = "strftime_now" in self._template
        self._knows_developer = "developer" in self._template
        self._max_model_len = max_model_len
        # No token is longer than this, so a longer text cannot fit, and need not be tokenised to know it.
        longest = max((len(piece) for piece in self._backend.get_vocab()), default=1)
        self._max_chars = (max_model_len + 1) * longest
        self._encoder = IncrementalEncoder(self._encode, self._separators)
        self._timeout = timeout_seconds
        self._on_boundary_error = on_boundary_error
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="engram-render")

    async def prompt(self, chat: Chat) -> Prompt:
        """Render and locate. ApiError 400 when the template refuses the conversation or it cannot fit the window."""
        return await self._run(lambda: self.render(chat))

    async def next_history(self, chat: Chat, prompt: Prompt, reply: Mapping[str, Any]) -> list[int] | None:
        """Ids that every next request of this conversation begins with, after `reply`; None when there are none."""
        return await self._run(lambda: self.locate_next_history(chat, prompt, reply))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text. ApiError 400 for one that cannot fit the window."""
        self._check_length(text, "prompt")
        return await self._run(lambda: list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids))

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await self._run(lambda: str(self._hf.decode(list(ids), skip_special_tokens=skip_special_tokens)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def render(self, chat: Chat) -> Prompt:
        """Blocking form of `prompt`."""
        if not self._template:
            raise invalid("messages", "this checkpoint has no chat template: use /v1/completions")
        text = self._text(chat)
        if chat.tools and text == self._text(replace(chat, tools=())):
            raise invalid("tools", "tools cannot be shown to this model: its chat template does not render them")
        self._check_length(text)
        encoded = self._encoder.encode(text)
        if not encoded.ids:
            raise invalid("messages", "messages render to an empty prompt")
        finder = PrefixFinder(encoded, self._encode, self._separators)
        boundaries = self._boundaries(chat, encoded, finder)
        candidates = anchor_candidates(
            encoded,
            [(str(message["role"]), str(message["content"])) for message in chat.messages],
            user_start=boundaries.get("user_start"),
            history=boundaries.get("history"),
            separators=self._separators,
        )
        return Prompt(encoded, boundaries, candidates)

    def locate_next_history(self, chat: Chat, prompt: Prompt, reply: Mapping[str, Any]) -> list[int] | None:
        """Blocking form of `next_history`."""
        if chat.continue_final:
            final = {**chat.messages[-1], "content": str(chat.messages[-1]["content"]) + str(reply["content"])}
            said = [*chat.messages[:-1], final]
        else:
            said = [*chat.messages, reply]
        role = "tool" if reply.get("tool_calls") else "user"
        finder = PrefixFinder(prompt.encoded, self._encode, self._separators)
        try:
            first, second = (
                self._template_text(
                    replace(
                        chat,
                        messages=[*said, {"role": role, "content": probe}],
                        generation_prompt=True,
                        continue_final=False,
                    )
                )
                for probe in PROBES
            )
        except Exception:
            self._on_boundary_error("next_history")
            return None
        _, ids = finder.of_two(first, second)
        return ids or None

    def _boundaries(self, chat: Chat, encoded: Encoded, finder: PrefixFinder) -> dict[str, int]:
        found: dict[str, int] = {}
        last = len(encoded.ids) - 1
        try:
            plain = self._template_text(replace(chat, generation_prompt=False, continue_final=False))
            history = min(finder.with_main(plain), last)
        except Exception:
            self._on_boundary_error("history")
            history = 0
        if history > 0:
            found["history"] = history
        users = [index for index, message in enumerate(chat.messages) if message["role"] == "user"]
        if not users:
            return found
        try:
            first, second = (self._template_text(_with_content(chat, users[-1], probe)) for probe in PROBES)
        except Exception:
            self._on_boundary_error("user_start")
            return found
        # The prompt itself must share it too: content that merges with the header's last token begins earlier.
        shared = min(finder.of_two(first, second)[0], finder.with_main(first), finder.with_main(second))
        user_start = min(shared, history or last)
        if user_start > 0:
            found["user_start"] = user_start
        return found

    def _text(self, chat: Chat) -> str:
        try:
            return self._template_text(chat)
        except Exception as error:  # the template is code: whatever it raises is about this conversation
            reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise invalid("messages", f"messages: the model's chat template refused them: {reason}") from error

    def _template_text(self, chat: Chat) -> str:
        messages = [dict(message) for message in chat.messages]
        if not self._knows_developer:
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
        date = chat.date or datetime.now()
        return str(
            self._hf.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in chat.tools] or None,
                tokenize=False,
                add_generation_prompt=chat.generation_prompt and not chat.continue_final,
                continue_final_message=chat.continue_final,
                strftime_now=date.strftime,
                **chat.template_kwargs,
            )
        )

    def _encode(self, text: str) -> Encoding:
        encoding: Encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding

    def _check_length(self, text: str, field: str = "messages") -> None:
        if len(text) > self._max_chars:
            raise invalid(
                field,
                f"the prompt has {len(text)} characters and cannot fit this model's window of "
                f"{self._max_model_len} tokens",
                "context_length_exceeded",
            )

    async def _run(self, work: Callable[[], Result]) -> Result:
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.wait_for(future, self._timeout)
        except TimeoutError:
            raise ApiError(
                503,
                f"rendering and tokenising the prompt took longer than {self._timeout:g} s",
                code="render_timeout",
                retry_after=5,
            ) from None


def _with_content(chat: Chat, index: int, content: str) -> Chat:
    messages = list(chat.messages)
    messages[index] = {**messages[index], "content": content}
    return replace(chat, messages=messages)
