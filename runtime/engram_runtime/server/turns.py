"""A chat turn from request to engine and back into memory: the work that both forms of the answer share."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from starlette.datastructures import Headers

from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.errors import EngramError, NotFound
from engram_runtime.server.chat import Chat, Prompt, canonical
from engram_runtime.server.conversation import (
    Base,
    Record,
    Wishes,
    load_base,
    missing_base,
    overruled,
    read_wishes,
    recent_base,
    stored_base,
)
from engram_runtime.server.errors import ApiError, invalid
from engram_runtime.server.generation import Job, check_window
from engram_runtime.server.protocol.chat import ChatRequest
from engram_runtime.server.state import Loaded, ServerState
from engram_runtime.server.tenants import Principal

log = logging.getLogger("engram.server")


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """Everything known about a turn before it runs."""

    tenant: str
    chat: Chat
    prompt: Prompt
    record: Record
    job: Job

    @property
    def spec(self) -> TurnSpec:
        assert self.job.turn is not None
        return self.job.turn


def check_model(state: ServerState, name: str | None) -> None:
    served = state.config.served_model_name
    if name is not None and name != served:
        raise ApiError(
            404,
            f"the model {name[:100]!r} does not exist here; this server has {served!r}",
            param="model",
            code="model_not_found",
        )


async def find_base(state: ServerState, loaded: Loaded, principal: Principal, wishes: Wishes) -> Base | None:
    """What a continuing request builds on; None for one that carries its whole history."""
    if not wishes.continues:
        return None
    principal.require_memory("delta" if wishes.delta else "restore_from")
    recent = recent_base(state.recent, principal.tenant, wishes)
    service = loaded.snapshots
    if recent is not None:
        if service is None or not await asyncio.to_thread(overruled, service, principal.tenant, wishes, recent):
            return recent
        state.recent.forget(principal.tenant, recent.conversation_id, recent.turn_number)
    try:
        if service is None:
            raise NotFound("snapshots are off on this server and the turn is not in memory")
        info = await asyncio.to_thread(stored_base, service, principal.tenant, wishes)

        def decode(ids: list[int]) -> str:
            return str(loaded.engine.tokenizer.decode(ids, skip_special_tokens=True))

        return await asyncio.to_thread(load_base, service, principal.tenant, info, decode)
    except NotFound as error:
        raise missing_base(wishes, error) from error


async def prepare(
    state: ServerState, loaded: Loaded, principal: Principal, headers: Headers, body: ChatRequest, request_id: str
) -> ChatTurn:
    """Render, locate, check. ApiError or ValueError for anything the client can mend."""
    wishes = read_wishes(body, headers)
    base = await find_base(state, loaded, principal, wishes)
    messages: list[Any] = [canonical(message) for message in body.messages]
    tools: tuple[Any, ...] = tuple(body.shown_tools)
    template_kwargs = dict(body.chat_template_kwargs)
    if base is not None:
        if not base.record.messages:
            raise invalid("restore_from", "restore_from names a snapshot of a text completion: it holds no messages")
        messages = [*base.record.messages, *messages]
        if body.tool_choice != "none":
            tools = tools or base.record.tools
        template_kwargs = {**base.record.template_kwargs, **template_kwargs}
    chat = Chat(
        messages=messages,
        tools=tools,
        template_kwargs=template_kwargs,
        generation_prompt=body.generation_prompt,
        continue_final=body.continue_final_message,
        date=await _date(state, loaded, principal, wishes, base, messages),
    )
    params = body.sampling(max_tokens=body.limit, logprobs=body.logprob_count)
    params.check_vocabulary(loaded.engine.vocab_size)
    prompt = await loaded.renderer.prompt(chat)
    check_window("messages", len(prompt.ids), body.limit, loaded.engine.max_model_len)
    record = Record(tuple(messages), tools, template_kwargs, chat.date, prompt_tokens=len(prompt.ids))
    spec = turn_spec(loaded, principal, wishes, base)
    spec = replace(
        spec,
        durable=state.saving.durable(principal.tenant, spec.conversation_id, spec.branch_name),
        boundaries=prompt.boundaries,
        answered=_answered(chat, prompt),
        candidates=prompt.candidates,
        # Prompt log-probabilities exist only where the prompt is computed.
        restore=spec.restore and body.prompt_logprobs is None,
        messages=record.dump(),
    )
    return ChatTurn(principal.tenant, chat, prompt, record, Job(request_id, prompt.ids, params, spec))


def turn_spec(loaded: Loaded, principal: Principal, wishes: Wishes, base: Base | None) -> TurnSpec:
    """What the engine should do about memory, without positions and messages."""
    conversation, branch, turn_number = wishes.conversation_id, wishes.branch_name or "main", None
    if base is not None:
        conversation = conversation or base.conversation_id
        branch = wishes.branch_name or base.branch_name
        turn_number = base.turn_number + 1
    return TurnSpec(
        tenant=principal.tenant,
        conversation_id=conversation,
        branch_name=branch,
        turn_number=turn_number,
        restore=wishes.restore,
        save=wishes.save,
        restore_from=base.snapshot_id if base is not None else None,
        tokenizer_digest=loaded.renderer.tokenizer_digest,
        template_digest=loaded.renderer.template_digest,
    )


def _answered(chat: Chat, prompt: Prompt) -> int | None:
    """`TurnSpec.answered`: None where the last user message follows the last answer.

    Where a tool's result does, that user message began before the answer, and `user_start` with it. All that lies
    before the end of what is asked now has been answered then.
    """
    roles = [message["role"] for message in chat.messages]
    since = roles[::-1].index("user") if "user" in roles else len(roles)
    history = prompt.boundaries.get("history")
    if chat.continue_final or history is None or "assistant" not in roles[len(roles) - since :]:
        return None
    return history - 1


async def _date(
    state: ServerState, loaded: Loaded, principal: Principal, wishes: Wishes, base: Base | None, messages: list[Any]
) -> datetime | None:
    """The date a date-printing template should show this conversation."""
    if not loaded.renderer.prints_date:
        return None
    if base is not None and base.record.date is not None:
        return base.record.date
    pinned = state.dates.of(principal.tenant, wishes.conversation_id, messages)
    if pinned is not None:
        return pinned
    if wishes.conversation_id is not None and loaded.snapshots is not None and principal.remembers:
        # Another replica, or this one before it was restarted, may have begun the conversation.
        try:
            info = await asyncio.to_thread(
                loaded.snapshots.resolve,
                principal.tenant,
                wishes.conversation_id,
                None,
                wishes.branch_name or "main",
            )
            content = await asyncio.to_thread(loaded.snapshots.content, principal.tenant, info.snapshot_id)
            stored = Record.load(content.messages).date if content.messages is not None else None
        except (EngramError, ValueError):
            stored = None
        if stored is not None:
            return stored
    return datetime.now().replace(microsecond=0)


def finish(state: ServerState, loaded: Loaded, turn: ChatTurn, report: TurnReport | None, text: str) -> None:
    """Remember a finished turn and warm up the next one in the background; costs the response nothing."""
    if report is None or not turn.spec.save or turn.job.params.n != 1:
        return
    reply = {"role": "assistant", "content": text}
    said: list[Any] = list(turn.chat.messages)
    if turn.chat.continue_final:
        said[-1] = {**said[-1], "content": str(said[-1]["content"]) + text}
    else:
        said.append(reply)
    record = replace(turn.record, messages=tuple(said), prompt_tokens=None)
    # A turn that was moved to a branch of its own goes on under the name that its client knows, too.
    for branch in dict.fromkeys((turn.spec.branch_name, report.branch_name)):
        state.recent.remember(
            turn.tenant,
            Base(record, report.conversation_id, branch, report.turn_number, report.snapshot_id),
            len(turn.spec.messages or b"") + len(text),
        )
    state.saving.ended((turn.tenant, report.conversation_id, report.branch_name), turn.spec.durable)
    if turn.chat.date is not None:
        state.dates.pin(turn.tenant, report.conversation_id, said, turn.chat.date)
    if not state.spawn(_warm(state, loaded, turn, report, record, reply)):
        state.metrics.rewarm("refused")


async def _warm(
    state: ServerState, loaded: Loaded, turn: ChatTurn, report: TurnReport, record: Record, reply: dict[str, str]
) -> None:
    try:
        ids = await loaded.renderer.next_history(turn.chat, turn.prompt, reply)
        if ids is None or len(ids) >= loaded.engine.max_model_len:
            state.metrics.rewarm("no_boundary" if ids is None else "too_long")
            return
        spec = replace(
            turn.spec,
            conversation_id=report.conversation_id,
            branch_name=report.branch_name,
            turn_number=report.turn_number,
            boundaries={},
            answered=None,
            candidates=(),
            restore_from=None,
            messages=record.dump(),
        )
        await loaded.engine.warm(ids, spec, boundary="next_history")
        state.metrics.rewarm("done")
    except Exception as error:  # the reply is out; what is lost is a head start
        log.warning("next turn of %s was not warmed up: %s", report.conversation_id, error)
        state.metrics.rewarm("failed")
