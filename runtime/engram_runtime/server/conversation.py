"""What a request continues: resolves `restore_from` and `delta` to stored messages, and remembers recent turns.

The canonical messages travel with every snapshot as an opaque record made here, so a request that carries only its new
messages becomes the full conversation again, on any replica, and is then served exactly like one.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from engram_runtime.errors import Deleted, NotFound, SnapshotError
from engram_runtime.server.errors import ApiError, invalid
from engram_runtime.server.protocol.common import ConversationFields
from engram_runtime.snapshots.policy.ids import check_branch_name, check_conversation_id, is_id
from engram_runtime.snapshots.types import SnapshotInfo, Snapshots

RECORD_VERSION = 1
HEADER_FIELDS = ("conversation_id", "branch_name", "restore_from", "auto_save", "stateful_mode", "delta")


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation as it is stored: what the template saw, and the reply once it is known."""

    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: datetime | None = None
    prompt_tokens: int | None = None
    """Length of the prompt that `messages` rendered to, while the reply is not among them."""

    def dump(self) -> bytes:
        value: dict[str, Any] = {"version": RECORD_VERSION, "messages": list(self.messages)}
        if self.tools:
            value["tools"] = list(self.tools)
        if self.template_kwargs:
            value["template_kwargs"] = dict(self.template_kwargs)
        if self.date is not None:
            value["date"] = self.date.isoformat(timespec="seconds")
        if self.prompt_tokens is not None:
            value["prompt_tokens"] = self.prompt_tokens
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes) -> Record:
        """ValueError when the bytes are not such a record."""
        value = json.loads(data)
        if not isinstance(value, dict) or value.get("version") != RECORD_VERSION:
            raise ValueError("messages record has an unknown version")
        messages = value.get("messages")
        if not isinstance(messages, list) or not all(isinstance(item, dict) and "role" in item for item in messages):
            raise ValueError("messages record holds no messages")
        date = value.get("date")
        return cls(
            messages=tuple(messages),
            tools=tuple(value.get("tools", ())),
            template_kwargs=value.get("template_kwargs", {}),
            date=datetime.fromisoformat(date) if isinstance(date, str) else None,
            prompt_tokens=value.get("prompt_tokens"),
        )


@dataclass(frozen=True, slots=True)
class Base:
    """What a request builds on."""

    record: Record
    conversation_id: str
    branch_name: str
    turn_number: int
    snapshot_id: str | None = None
    """Where the engine may restore from; None while it is only known from memory."""
    token_ids: Sequence[int] = ()
    saved_as: str | None = field(default=None, compare=False)
    """The snapshot of a turn that is known from memory; it may not be written yet."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """The conversation fields of a request, header and body merged and checked."""

    conversation_id: str | None
    branch_name: str | None
    restore_from: str | None
    delta: bool
    restore: bool
    save: bool

    @property
    def continues(self) -> bool:
        """The request carries only its new messages."""
        return self.restore_from is not None or self.delta


def read_wishes(fields: ConversationFields, headers: Mapping[str, str]) -> Wishes:
    """Body fields win over headers. ApiError 400 names the field."""
    values: dict[str, Any] = {name: getattr(fields, name) for name in HEADER_FIELDS}
    for name in HEADER_FIELDS:
        header = f"x-engram-{name.replace('_', '-')}"
        text = headers.get(header)
        if text is None or values[name] is not None:
            continue
        if name in ("auto_save", "delta"):
            if text.lower() not in ("true", "false"):
                raise invalid(header, f"{header} must be true or false, got {text[:40]!r}")
            values[name] = text.lower() == "true"
        elif name == "stateful_mode" and text not in ("auto", "stateless", "explicit"):
            raise invalid(header, f"{header} must be auto, stateless or explicit, got {text[:40]!r}")
        else:
            values[name] = text
    try:
        if values["conversation_id"] is not None:
            check_conversation_id(values["conversation_id"])
        if values["branch_name"] is not None:
            check_branch_name(values["branch_name"])
    except ValueError as error:
        raise invalid(str(error).split(" ", 1)[0], str(error)) from error
    return _merge(values)


def _merge(values: Mapping[str, Any]) -> Wishes:
    mode = values["stateful_mode"] or "auto"
    restore_from, delta = values["restore_from"], bool(values["delta"])
    if restore_from is not None and delta:
        raise invalid("delta", "delta and restore_from exclude each other: both say what the new messages follow")
    if delta and values["conversation_id"] is None:
        raise invalid("conversation_id", "conversation_id is required with delta")
    if mode == "stateless" and (restore_from is not None or delta or values["auto_save"]):
        raise invalid("stateful_mode", "stateful_mode stateless excludes restore_from, delta and auto_save")
    auto_save = values["auto_save"]
    return Wishes(
        conversation_id=values["conversation_id"],
        branch_name=values["branch_name"],
        restore_from=restore_from,
        delta=delta,
        restore=mode == "auto" or (mode == "explicit" and (restore_from is not None or delta)),
        save=auto_save if auto_save is not None else mode == "auto",
    )


def parse_selector(text: str) -> str | tuple[str, int]:
    """A snapshot id, or (conversation, turn) split at the last colon. ApiError 400 for anything else."""
    if is_id(text):
        return text
    conversation, colon, turn = text.rpartition(":")
    if not colon or not turn.isascii() or not turn.isdigit() or len(turn) > 9:
        raise invalid("restore_from", 'restore_from must be "conversation:turn" or a snapshot id of 32 hex digits')
    try:
        check_conversation_id(conversation)
    except ValueError as error:
        raise invalid("restore_from", f"restore_from: {error}") from error
    return conversation, int(turn)


class RecentTurns:
    """Records of the newest turns with their replies, bounded in bytes: what a delta right after a reply builds on,
    while its snapshot is still being written. Not thread-safe: one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        # key -> record with the reply, snapshot id, bytes
        self._turns: OrderedDict[tuple[str, str, str, int], tuple[Record, str | None, int]] = OrderedDict()
        self._heads: dict[tuple[str, str, str], int] = {}
        self._by_id: dict[tuple[str, str], tuple[str, str, str, int]] = {}

    def remember(self, tenant: str, base: Base, size: int) -> None:
        """`size` is about what the record takes, in bytes."""
        key = (tenant, base.conversation_id, base.branch_name, base.turn_number)
        self._drop(key)
        record, snapshot_id = base.record, base.snapshot_id
        self._turns[key] = (record, snapshot_id, size)
        self._heads[key[:3]] = base.turn_number
        if snapshot_id is not None:
            self._by_id[tenant, snapshot_id] = key
        self._bytes += size
        while self._bytes > self._max_bytes and self._turns:
            self._drop(next(iter(self._turns)))

    def turn(self, tenant: str, conversation: str, branch: str, turn: int | None) -> Base | None:
        """A turn, or the head of the branch for None."""
        number = self._heads.get((tenant, conversation, branch)) if turn is None else turn
        entry = None if number is None else self._turns.get((tenant, conversation, branch, number))
        if entry is None or number is None:
            return None
        return Base(entry[0], conversation, branch, number, saved_as=entry[1])

    def snapshot(self, tenant: str, snapshot_id: str) -> Base | None:
        key = self._by_id.get((tenant, snapshot_id))
        return None if key is None else self.turn(*key)

    def forget(self, tenant: str, conversation: str, turn: int) -> None:
        """A deleted turn must not be continued from memory either."""
        for key in [key for key in self._turns if key[:2] == (tenant, conversation) and key[3] == turn]:
            self._drop(key)

    def forget_branch(self, tenant: str, conversation: str, branch: str) -> None:
        """The head was moved by hand: what is stored decides what it is now."""
        for key in [key for key in self._turns if key[:3] == (tenant, conversation, branch)]:
            self._drop(key)

    def _drop(self, key: tuple[str, str, str, int]) -> None:
        entry = self._turns.pop(key, None)
        if entry is None:
            return
        self._bytes -= entry[2]
        if self._heads.get(key[:3]) == key[3]:
            del self._heads[key[:3]]
        if entry[1] is not None:
            self._by_id.pop((key[0], entry[1]), None)


def recent_base(recent: RecentTurns, tenant: str, wishes: Wishes) -> Base | None:
    """The base from memory: it holds the reply even while the snapshot of it is still being written."""
    if wishes.restore_from is None:
        return recent.turn(tenant, wishes.conversation_id or "", wishes.branch_name or "main", None)
    selector = parse_selector(wishes.restore_from)
    if isinstance(selector, str):
        return recent.snapshot(tenant, selector)
    for branch in _branches(wishes):
        base = recent.turn(tenant, selector[0], branch, selector[1])
        if base is not None:
            return base
    return None


def overruled(service: Snapshots, tenant: str, wishes: Wishes, recent: Base) -> bool:
    """Whether other replicas know better than this one's memory: the turn was deleted, or the branch went on. Blocking.

    A turn that nobody has heard of is still being written, and one that cannot be asked for is believed.
    """
    try:
        if recent.saved_as is not None:
            service.get(tenant, recent.saved_as)
    except Deleted:
        return True
    except SnapshotError:
        pass
    if not wishes.delta:
        return False
    try:
        head = service.resolve(tenant, recent.conversation_id, None, recent.branch_name)
    except SnapshotError:
        return False
    # A turn that was never answered (dropped in the middle) is none to go on from.
    return head.turn_number > recent.turn_number and head.boundary != "history"


def stored_base(service: Snapshots, tenant: str, wishes: Wishes) -> SnapshotInfo:
    """The snapshot that a continuing request names. Blocking; NotFound when there is none."""
    if wishes.restore_from is None:
        return service.resolve(tenant, wishes.conversation_id or "", None, wishes.branch_name or "main")
    selector = parse_selector(wishes.restore_from)
    if isinstance(selector, str):
        return service.get(tenant, selector)
    *others, last = _branches(wishes)
    for branch in others:
        try:
            return service.resolve(tenant, *selector, branch)
        except NotFound:
            continue
    return service.resolve(tenant, *selector, last)


def _branches(wishes: Wishes) -> list[str]:
    """A branch that does not exist yet forks from main."""
    return list(dict.fromkeys((wishes.branch_name or "main", "main")))


def load_base(service: Snapshots, tenant: str, info: SnapshotInfo, decode: Callable[[list[int]], str]) -> Base:
    """The stored messages of a snapshot, with the reply of its turn. Blocking.

    decode(ids) -> text, without special tokens: the reply of a turn_end snapshot is only known as tokens. SnapshotError
    when the snapshot holds no messages.
    """
    content = service.content(tenant, info.snapshot_id)
    tokens = [*content.token_ids, *content.pending_ids]
    record = Record()
    if content.messages is not None:
        try:
            record = Record.load(content.messages)
        except ValueError as error:
            raise SnapshotError(f"snapshot {info.snapshot_id}: {error}") from error
    if record.prompt_tokens is not None and info.boundary == "turn_end" and len(tokens) > record.prompt_tokens:
        reply = {"role": "assistant", "content": decode(tokens[record.prompt_tokens :])}
        record = Record((*record.messages, reply), record.tools, record.template_kwargs, record.date)
    return Base(record, info.conversation_id, info.branch_name, info.turn_number, info.snapshot_id, tokens)


def missing_base(wishes: Wishes, error: NotFound) -> ApiError:
    """404 for an explicit restore, 409 for a delta, which the client answers by sending everything once."""
    if wishes.delta:
        return ApiError(
            409, "the base of this delta is gone: send the full history", param="delta", code="need_full_history"
        )
    return ApiError(404, f"restore_from: {error}", param="restore_from", code="snapshot_not_found")
