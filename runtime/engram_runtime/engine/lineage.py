"""Who is speaking: which turn of which conversation a request is, and which snapshot it continues.

Told from the boundaries that lie on the request's prompt, the deepest one of its conversation first. Behind an answer
the next turn goes on; before it, its turn is asked once more. A reply that comes back in other tokens than were
generated hides the end of its turn, unless `next_history` was prepared in time. Then the deepest boundary is that
turn's `history`, and what tells the next turn from the same one is where its own last message begins.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from engram_runtime.engine.request import Identity, Request
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.snapshots.policy.ids import new_id

REMEMBERED_TURNS = 10_000
REMEMBERED_ANSWERS = 8
"""To one prompt."""

COMPLETED = ("turn_end", "next_history")
"""Boundaries after an answer: who goes on from there is the next turn of the same conversation."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Mark:
    """What the prefix index remembers of a boundary."""

    boundary: str
    conversation_id: str
    branch_name: str
    turn_number: int
    snapshot_id: str | None
    """Of the durable snapshot at exactly this position, if one was made."""
    parent_id: str | None = None
    """The snapshot that the turn continued; None where the mark came with a snapshot."""
    prompt_key: str = ""
    """As in the turn's `Identity`; empty where the mark came with a snapshot."""


@dataclass(frozen=True, slots=True)
class _Base:
    """The boundary that a request builds on."""

    mark: Mark
    answered: bool
    """The request comes after the answer of the mark's turn; else it asks that turn once more."""


@dataclass(frozen=True, slots=True)
class _Head:
    """Where a branch stands, as far as this process knows."""

    branch_name: str
    turn_number: int = 0
    snapshot_id: str | None = None


class Lineage:
    """Engine thread only, but for `note_branch`."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[str, str, str], tuple[int, str | None]] = OrderedDict()
        """By tenant, conversation and branch: the turn that ended last, and its snapshot."""
        self._answers: OrderedDict[str, tuple[tuple[str, str | None], ...]] = OrderedDict()
        """By prompt key: branch and snapshot of the answers to that prompt, the newest first."""
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Branches of snapshots by id: the one asked for, unless another writer was faster. Under the lock: the
        service's threads write it too."""
        self._lock = threading.Lock()

    # Telling

    def identify(self, request: Request) -> Identity:
        """Settle conversation, branch and turn number; the first sequence must have been admitted (or have failed)."""
        if request.identity is not None:
            return request.identity
        turn = request.turn
        if turn is None:
            raise ValueError("turn: a request without one has no identity")
        marks: tuple[tuple[int, Mark], ...] = request.first.match.marks if request.first.match is not None else ()
        conversation, branch = turn.conversation_id, turn.branch_name
        if conversation is None:
            known = next((mark for _, mark in marks if mark.boundary in COMPLETED), None)
            conversation = known.conversation_id if known is not None else new_id()
            branch = known.branch_name if known is not None else branch
        own = [(position, mark) for position, mark in marks if mark.conversation_id == conversation]
        warm = request.warm_boundary is not None
        if warm and turn.turn_number is not None:  # its prompt may hold what later turns left behind
            own = [(position, mark) for position, mark in own if mark.turn_number == turn.turn_number]
        base = _base_of(own, turn, warm)
        head = self._head(turn.tenant, conversation, branch)
        # A shared system prompt makes no kinship: only the conversation's own snapshots, or the one that was named.
        kin = (m for _, m in marks if m.conversation_id == conversation or m.snapshot_id == turn.restore_from)
        kinsman = next((mark for mark in kin if mark.snapshot_id is not None), None)
        parent = self._parent(turn, base, kinsman, head, branch)
        number = turn.turn_number
        if number is None and base is not None:
            # A warm-up belongs to the turn it follows; going on from before an answer repeats its turn.
            number = base.mark.turn_number + (base.answered and not warm)
        elif number is None:
            stored = request.restore.head_turn if request.restore is not None else 0
            number = max(head.turn_number, stored, own[0][1].turn_number if own else 0) + 1
        if base is None and kinsman is None:
            branch = head.branch_name
        elif kinsman is None or kinsman.snapshot_id != parent:
            branch = self._branch_after(parent, base.mark.branch_name if base is not None else branch, branch)
        elif kinsman.conversation_id == conversation:
            branch = self._branch_after(parent, kinsman.branch_name, branch)
        key = _prompt_key(own, warm, turn.boundaries.get("history")) or new_id()
        request.identity = Identity(conversation, branch, number, parent, key)
        return request.identity

    def _parent(self, turn: TurnSpec, base: _Base | None, kinsman: Mark | None, head: _Head, branch: str) -> str | None:
        """The snapshot that a turn of `branch` continues."""
        nearest = kinsman.snapshot_id if kinsman is not None else None
        if base is None or (nearest is not None and nearest == turn.restore_from):
            return nearest or head.snapshot_id
        mark = base.mark
        if not base.answered:  # what its turn continued then, it continues now
            return mark.snapshot_id or mark.parent_id or nearest or head.snapshot_id
        if mark.boundary in COMPLETED and mark.snapshot_id is not None:
            return mark.snapshot_id
        is_last = head.turn_number == mark.turn_number and head.snapshot_id is not None
        if is_last and not mark.prompt_key and mark.boundary not in COMPLETED:
            return head.snapshot_id  # a turn that came with a snapshot was asked again since
        # Never the branch's head for want of better: that would put the turn behind one that it does not continue.
        return self._answer(mark.prompt_key, branch) or mark.snapshot_id or mark.parent_id or nearest

    def _answer(self, prompt_key: str, branch: str) -> str | None:
        """The snapshot of the newest answer to a prompt: on this branch, if there is one."""
        answers = self._answers.get(prompt_key, ())
        here = [snapshot for name, snapshot in answers if name == branch or name.startswith(f"{branch}~")]
        return next(iter(here or (snapshot for _, snapshot in answers)), None)

    def _head(self, tenant: str, conversation: str, branch: str) -> _Head:
        """The last turn of a branch: where that was moved to another branch, the last one there."""
        head, seen = _Head(branch), set[str]()
        while head.branch_name not in seen:
            seen.add(head.branch_name)
            before = (head.turn_number, head.snapshot_id)
            number, snapshot = self._newest.get((tenant, conversation, head.branch_name), before)
            head = _Head(self._branch_after(snapshot, head.branch_name, branch), number, snapshot)
        return head

    def _branch_after(self, snapshot_id: str | None, told: str, branch: str) -> str:
        """Where a turn goes on that asked for `branch`: on the branch that its parent was moved to. `told`: the
        parent's branch where nothing is remembered of it."""
        with self._lock:
            actual = self._homes.get(snapshot_id or "", told)
        return actual if actual.startswith(f"{branch}~") else branch

    def is_last(self, tenant: str, identity: Identity) -> bool:
        """Whether no other turn of the branch has ended since this one, as far as is remembered."""
        key = (tenant, identity.conversation_id, identity.branch_name)
        return self._newest.get(key, (identity.turn_number, None))[0] == identity.turn_number

    # Remembering

    def remember(self, tenant: str, identity: Identity, snapshot: str | None) -> None:
        """A turn ended, or was warmed up for its successor; `snapshot` is what it left."""
        branch, key = identity.branch_name, identity.prompt_key
        _keep(self._newest, (tenant, identity.conversation_id, branch), (identity.turn_number, snapshot))
        _keep(self._answers, key, ((branch, snapshot), *self._answers.get(key, ()))[:REMEMBERED_ANSWERS])
        if snapshot is not None:
            with self._lock:
                _keep(self._homes, snapshot, self._homes.get(snapshot, branch))

    def note_branch(self, snapshot_id: str, branch: str) -> None:
        """Any thread: a save is over, and the snapshot is on `branch`."""
        with self._lock:
            _keep(self._homes, snapshot_id, branch)


def _keep(mapping: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    mapping[key] = value
    mapping.move_to_end(key)
    if len(mapping) > REMEMBERED_TURNS:
        mapping.popitem(last=False)


def _base_of(own: list[tuple[int, Mark]], turn: TurnSpec, warm: bool) -> _Base | None:
    """What a request builds on, by the deepest boundary of its conversation; None where that tells nothing."""
    if not own:
        return None
    position, mark = own[0]
    if warm or mark.boundary in COMPLETED:
        return _Base(mark, answered=True)
    start = turn.boundaries.get("user_start")
    answered = start if turn.answered is None else turn.answered
    if mark.boundary == "history":
        return _Base(mark, answered=answered is not None and position <= answered)
    if mark.snapshot_id is not None:  # a snapshot that is shared up to here: into the message, or into the answer
        return _Base(mark, answered=answered is not None and position < answered)
    if start is not None and position < start:
        return None  # another message stood here: the history was cut or rewritten, and how far it goes is not known
    return _Base(mark, answered=False)


def _prompt_key(own: list[tuple[int, Mark]], warm: bool, history: int | None) -> str:
    """The key of the turn with this very prompt, if there was one."""
    if warm:
        return own[0][1].prompt_key if own else ""
    same = (mark.prompt_key for position, mark in own if mark.boundary == "history" and position == history)
    return next(same, "")
