"""The boundaries of turns: which are captured, what they are called, which become durable and when.

Every captured boundary is findable in the GPU prefix index at once. Durable is one snapshot a turn: `turn_end` waits a
moment, so that `next_history` (the same turn as the next request will render it) can take its place under the same
snapshot id. The state at `user_start` goes into that snapshot too, where nothing durable lies near it. With n > 1 no
sequence is the turn's answer, so only `history` is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from engram_runtime.cache.manager import CacheManager, Lease
from engram_runtime.engine.lineage import COMPLETED, Lineage, Mark
from engram_runtime.engine.request import Identity, Request
from engram_runtime.engine.sequence import Sequence
from engram_runtime.snapshots.policy.ids import new_id
from engram_runtime.snapshots.types import Capture, SaveResult, Snapshots

COVER_SLACK = 32
"""A durable boundary (or the beginning) this close below user_start makes a second state pointless: computing so little
costs nothing."""
GRACE_WITH_WARM = 10.0
"""While next_history is on its way turn_end waits up to this many times the grace."""
CROWDED_SHARE = 0.25
REMEMBERED_CONVERSATIONS = 10_000


@dataclass(slots=True)
class _Held:
    """A turn_end that waits for its next_history."""

    capture: Capture
    leases: tuple[Lease, ...]
    deadline: float
    last_deadline: float


TurnKey: TypeAlias = tuple[str, str, str, int]
"""Tenant, conversation, branch, turn."""


class Boundaries:
    """Engine thread only; `release` of a capture may come from any thread and goes through `post_release`."""

    def __init__(
        self,
        cache: CacheManager,
        snapshots: Snapshots | None,
        *,
        grace_seconds: float,
        clock: Callable[[], float],
        post_release: Callable[[Lease], None],
    ) -> None:
        self._cache = cache
        self._snapshots = snapshots
        self._grace = grace_seconds
        self._clock = clock
        self._post_release = post_release
        self._held: dict[TurnKey, _Held] = {}
        self._lineage = Lineage()
        self._rewarmed: OrderedDict[tuple[str, str], int] = OrderedDict()
        """Tokens computed in the background for a conversation, until a turn of it reports them."""
        self.saves_requested = 0
        self.saves_superseded = 0

    def identify(self, request: Request) -> Identity:
        """Settle conversation, branch and turn number; the first sequence must have been admitted (or have failed)."""
        return self._lineage.identify(request)

    def _note_branch(self, snapshot_id: str, asked: str, result: SaveResult) -> None:
        """Any thread: a save is over."""
        if result.branch_name != asked:
            self._lineage.note_branch(snapshot_id, result.branch_name)

    # Capturing

    def passed(self, request: Request, sequence: Sequence, start: int, end: int, slot: int | None) -> None:
        """Prefill of the first sequence went from `start` to `end`; `slot` holds the state at `end`, if captured."""
        for kind, position in request.boundaries:
            # What a cached prefix covers was captured when it was computed; what is computed again was captured before.
            fresh = position > sequence.prefix_tokens and kind not in request.captured
            if fresh and start < position <= end:
                request.captured.add(kind)
                at_end = slot if position == end else None
                if self._cache.has_state and at_end is None:
                    continue  # no slot was free: this boundary cannot be gone back to
                snapshot = self._save_passed(request, sequence, kind, position, at_end)
                self._record(request, sequence, kind, position, at_end, snapshot)

    def _save_passed(
        self, request: Request, sequence: Sequence, kind: str, position: int, slot: int | None
    ) -> str | None:
        if kind != "history" or request.params.n == 1:
            return None
        capture = self._capture(request, sequence, kind, position, slot, new_id())
        return None if capture is None else self._hand_over(capture[0])

    def _start_slot(self, request: Request, sequence: Sequence, kind: str, position: int) -> int | None:
        """The slot of the state at user_start that is to be saved with a boundary of this turn; None where there is
        no need (dense models: KV can be cut anywhere), or it was evicted."""
        start = dict(request.boundaries).get("user_start")
        wanted = kind in ("history", "turn_end") and "user_start" in request.captured
        if not wanted or start is None or start >= position or self._is_covered(sequence, start):
            return None
        found = self._cache.match(request.tenant, sequence.token_ids(0, start), start)
        return found.state if found.position == start else None

    def _is_covered(self, sequence: Sequence, position: int) -> bool:
        marks = sequence.match.marks if sequence.match is not None else ()
        return position < COVER_SLACK or any(
            place > position - COVER_SLACK for place, mark in marks if mark.snapshot_id is not None
        )

    def share(self, sequence: Sequence, position: int, slot: int | None) -> None:
        """Make a prompt findable for the sibling sequences that wait for it."""
        tokens = sequence.token_ids(0, position)
        spot = self._cache.register(sequence.chain, tokens, sequence.block_ids, position, partial=True)
        if spot is not None:
            self._cache.record(spot, position, slot)

    def finished(self, request: Request, sequence: Sequence, slot: int | None, *, complete: bool) -> None:
        """A sequence ended with everything before `computed` forwarded and its state in `slot`.

        `complete` is false for aborted and failed ones: what they computed can be used again, but it is no turn_end.
        """
        position = sequence.computed
        if position <= 0 or not sequence.block_ids:
            return
        if not complete or request.turn is None or request.params.n > 1:
            self._record(request, sequence, None, position, slot, None)
            return
        identity = self.identify(request)
        snapshot = new_id()
        made = self._capture(request, sequence, "turn_end", position, slot, snapshot)
        self._record(request, sequence, "turn_end", position, slot, snapshot if made is not None else None)
        self._lineage.remember(request.tenant, identity, snapshot if made is not None else None)
        if made is not None and self._is_crowded():
            self._hand_over(made[0])
        elif made is not None:
            now = self._clock()
            key = (request.tenant, identity.conversation_id, identity.branch_name, identity.turn_number)
            self.flush(key)
            last = now + self._grace * GRACE_WITH_WARM
            self._held[key] = _Held(*made, deadline=now + self._grace, last_deadline=last)

    def _is_crowded(self) -> bool:
        """Whether memory is too short to be kept for the sake of one write less."""
        pools = (self._cache.blocks, self._cache.states) if self._cache.has_state else (self._cache.blocks,)
        return any(pool.available < pool.size * CROWDED_SHARE for pool in pools)

    def warmed(self, request: Request, sequence: Sequence, slot: int | None) -> None:
        """A background request has computed its whole prompt: capture its boundary, in place of a held turn_end."""
        kind = request.warm_boundary
        if kind is None or request.turn is None or sequence.computed <= 0:
            return
        identity = self.identify(request)
        key = (request.tenant, identity.conversation_id, identity.branch_name, identity.turn_number)
        held = self._held.get(key)
        snapshot = held.capture.snapshot_id if held is not None else new_id()
        made = None
        # Whose successor has ended already would only be written beside it, on a branch of its own.
        if held is not None or self._lineage.is_last(request.tenant, identity):
            made = self._capture(request, sequence, kind, sequence.computed, slot, snapshot)
        if made is not None and held is not None:
            capture, leases = made
            capture.parent_id = held.capture.parent_id
            capture.user_start = held.capture.user_start
            capture.messages = capture.messages or held.capture.messages
            if held.capture.start_slot is not None:
                leases = (*leases, self._cache.lease((), held.capture.start_slot))
                capture.start_slot, capture.release = held.capture.start_slot, self._releasing(leases)
            del self._held[key]
            for lease in held.leases:
                lease.release()
            self.saves_superseded += 1
            made = capture, leases
        self._record(request, sequence, kind, sequence.computed, slot, snapshot if made is not None else None)
        if made is not None:
            self._hand_over(made[0])
            if self._lineage.is_last(request.tenant, identity):
                self._lineage.remember(request.tenant, identity, snapshot)

    def _record(
        self,
        request: Request,
        sequence: Sequence,
        kind: str | None,
        position: int,
        slot: int | None,
        snapshot: str | None,
    ) -> None:
        """Make the boundary findable in the GPU tier."""
        tokens = sequence.token_ids(0, position)
        spot = self._cache.register(sequence.chain, tokens, sequence.block_ids, position, partial=True)
        if spot is None:
            return
        mark: Mark | None = None
        if kind is not None and request.turn is not None:
            who = self.identify(request)
            number, parent, key = who.turn_number, who.parent_id, who.prompt_key
            mark = Mark(kind, who.conversation_id, who.branch_name, number, snapshot, parent, key)
            if kind not in COMPLETED and self._cache.mark_at(spot, position) is not None:
                mark = None  # another turn ended exactly here: that says more
        self._cache.record(spot, position, slot, mark)
        if kind in COMPLETED:
            # Going on, regenerating and editing all start at or above where this turn started.
            self._cache.thin_states(spot, min(sequence.prefix_tokens, position))
        # What the caller is told of: where the turn can be gone on from. user_start is where it came from.
        if kind is not None and kind != "user_start":
            request.boundary = kind
            request.snapshot_id = snapshot or request.snapshot_id

    # Saving

    def _capture(
        self, request: Request, sequence: Sequence, kind: str, position: int, slot: int | None, snapshot: str
    ) -> tuple[Capture, tuple[Lease, ...]] | None:
        """A capture with its leases; None when this turn is not to be saved, or cannot be."""
        turn = request.turn
        if self._snapshots is None or turn is None or not turn.save or (self._cache.has_state and slot is None):
            return None
        identity = self.identify(request)
        blocks = sequence.block_ids[: self._cache.blocks_for(position)]
        leases: tuple[Lease, ...] = (self._cache.lease(blocks, slot),)
        start_slot = self._start_slot(request, sequence, kind, position) if self._cache.has_state else None
        if start_slot is not None:
            leases = (*leases, self._cache.lease((), start_slot))
        start = turn.boundaries.get("user_start")
        capture = Capture(
            tenant=turn.tenant,
            conversation_id=identity.conversation_id,
            branch_name=identity.branch_name,
            turn_number=identity.turn_number,
            boundary=kind,
            snapshot_id=snapshot,
            parent_id=identity.parent_id,
            token_ids=sequence.token_ids(0, position),
            pending_ids=sequence.token_ids(position, sequence.known) if kind == "turn_end" else (),
            position=position,
            block_ids=blocks,
            state_slot=slot,
            release=self._releasing(leases),
            user_start=start if start is not None and 0 < start < position else None,
            start_slot=start_slot,
            messages=turn.messages,
            tokenizer_digest=turn.tokenizer_digest,
            template_digest=turn.template_digest,
            pin=turn.pin,
            tag=turn.tag,
            ttl_seconds=turn.ttl_seconds,
            durable=turn.durable,
            on_done=partial(self._note_branch, snapshot, identity.branch_name),
        )
        return capture, leases

    def _releasing(self, leases: tuple[Lease, ...]) -> Callable[[], None]:
        def release() -> None:
            for lease in leases:
                self._post_release(lease)

        return release

    def _hand_over(self, capture: Capture) -> str:
        """Save it, and before it what it continues: a head moves from a turn to the next one only."""
        if self._snapshots is None:
            raise RuntimeError("a capture was made without a snapshot service")
        before = [name for name, held in self._held.items() if held.capture.snapshot_id == capture.parent_id]
        for name in before:
            self.flush(name)
        self.saves_requested += 1
        self._snapshots.save(capture)
        return capture.snapshot_id

    def note_rewarmed(self, request: Request, tokens: int) -> None:
        """A warm-up of the request's conversation computed `tokens`; its next turn reports them."""
        key = (request.tenant, self.identify(request).conversation_id)
        self._rewarmed[key] = self._rewarmed.get(key, 0) + tokens
        self._rewarmed.move_to_end(key)
        if len(self._rewarmed) > REMEMBERED_CONVERSATIONS:
            self._rewarmed.popitem(last=False)

    def take_rewarmed(self, request: Request) -> int:
        """Tokens computed in the background for the request's conversation that no turn has reported yet."""
        return self._rewarmed.pop((request.tenant, self.identify(request).conversation_id), 0)

    def expect_warm(self, request: Request) -> None:
        """A warm-up of this turn was queued: its turn_end may wait longer."""
        turn = request.turn
        if turn is None:
            return
        for (tenant, conversation, _, number), held in self._held.items():
            same = turn.turn_number in (None, number)
            if tenant == turn.tenant and conversation == turn.conversation_id and same:
                held.deadline = held.last_deadline

    def flush(self, key: TurnKey | None = None, *, due_only: bool = False) -> None:
        """Hand held captures to the service: all, those of one turn, or those whose grace is over."""
        now = self._clock()
        for name, held in list(self._held.items()):
            if (key is None or name == key) and (not due_only or held.deadline <= now):
                del self._held[name]
                self._hand_over(held.capture)

    def next_deadline(self) -> float | None:
        """When a held capture is due, on the engine's clock."""
        return min((held.deadline for held in self._held.values()), default=None)
