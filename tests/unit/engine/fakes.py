"""An executor without a model: its memory holds digests of prefixes instead of keys and values.

Every cache position stores a digest of all tokens up to it, every state slot a digest of all tokens it has seen, and
the token it samples is a function of that digest alone. So a block shared, copied, swapped or restored wrongly is seen
at once, and the text of a request does not depend on how it was scheduled: it must equal `oracle`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engram_runtime.executor.plan import CacheGeometry, PromptLogprob, RowOpen, Sampled, StepPlan, StepResult
from engram_runtime.snapshots.types import Capture, Fetched, Miss, RestoreQuery

EMPTY = 7
VOCAB = 97


def grow(digest: int, token: int) -> int:
    return (digest * 1_000_003 + token + 1) % (1 << 61)


def digest_of(tokens: Sequence[int]) -> int:
    digest = EMPTY
    for token in tokens:
        digest = grow(digest, token)
    return digest


def next_token(digest: int) -> int:
    return digest % VOCAB


def oracle(prompt: Sequence[int], count: int) -> list[int]:
    """What a sequence without stops generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(digest_of(tokens)))
    return tokens[len(prompt) :]


def geometry(
    *, blocks: int = 32, block_size: int = 4, states: int = 0, window: int = 64, bytes_per_token: int = 1
) -> CacheGeometry:
    return CacheGeometry(blocks, block_size, states, bytes_per_token, 1 if states else 0, window)


class FakeExecutor:
    """Implements `StepExecutor` and `KVTransfer`; raises AssertionError when a plan would compute nonsense."""

    def __init__(self, sizes: CacheGeometry, *, max_tokens: int = 1 << 30) -> None:
        self._geometry = sizes
        self.steps_ahead = 0
        self.steps_together = 1
        self.launches: list[int] = []
        """How many plans were submitted together, each time that it were several."""
        self.max_tokens = max_tokens
        self.kv: list[list[int | None]] = [[None] * sizes.block_size for _ in range(sizes.num_blocks)]
        self.states: list[int | None] = [None] * sizes.num_state_slots
        self.rows: dict[int, RowOpen] = {}
        self.last: dict[int, int] = {}
        self.swapped: dict[int, tuple[list[int | None], int | None]] = {}
        self.plans: deque[StepPlan] = deque()
        self.history: list[StepPlan] = []
        self.rows_seen = 0
        self.fail_at: int | None = None
        self.tick: Callable[[], None] | None = None
        """Called once a step."""

    @property
    def geometry(self) -> CacheGeometry:
        return self._geometry

    @property
    def transfer(self) -> FakeExecutor:
        return self

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def submit_together(self, plans: Sequence[StepPlan]) -> None:
        rows = [[sequence.row for sequence in plan.sequences] for plan in plans]
        assert 1 < len(plans) <= self.steps_together
        assert all(other == rows[0] for other in rows), "other sequences in one launch"
        assert all(sequence.token_ids is None for plan in plans for sequence in plan.sequences)
        assert not any(plan.closes for plan in plans[1:])
        others = ("opens", "swap_out", "swap_in", "swap_drop", "block_copies", "state_loads", "state_saves")
        assert not any(getattr(plan, name) for plan in plans for name in others), "more than decodes in one launch"
        self.launches.append(len(plans))
        for plan in plans:
            self.submit(plan)

    def close(self) -> None:
        self.rows.clear()

    def collect(self) -> StepResult:
        plan = self.plans.popleft()
        self.history.append(plan)
        if self.tick is not None:
            self.tick()
        if self.fail_at is not None and plan.step >= self.fail_at:
            raise RuntimeError("the device caught fire")
        assert plan.num_tokens <= self.max_tokens, "the token budget was exceeded"
        self._change_rows(plan)
        self._move(plan)
        sampled: dict[int, Sampled] = {}
        scores: dict[int, tuple[PromptLogprob, ...]] = {}
        seen_prefill = False
        for sequence in plan.sequences:
            is_decode = sequence.num_tokens == 1 and sequence.start > 0
            assert not (is_decode and seen_prefill), "decodes come first"
            seen_prefill = seen_prefill or not is_decode
            tokens = sequence.token_ids if sequence.token_ids is not None else (self.last[sequence.row],)
            digest = self._before(sequence.block_ids, sequence.start)
            if self.states:
                state = EMPTY if sequence.start == 0 else self.states[sequence.state_slot]
                assert state == digest, "the running state does not belong to these tokens"
            for position, token in enumerate(tokens, sequence.start):
                digest = grow(digest, token)
                self._put(sequence.block_ids, position, digest)
            if self.states:
                self.states[sequence.written_slot] = digest
            self.rows_seen += len(tokens)
            if sequence.sample:
                token = next_token(digest)
                self.last[sequence.row] = token
                asked = self.rows[sequence.row].sampling.logprobs
                sampled[sequence.row] = Sampled(token, -0.5 if asked is not None else None)
            if sequence.prompt_logprobs:
                prompt = self.rows[sequence.row].prompt_ids
                targets = range(sequence.start + 1, min(sequence.start + sequence.num_tokens + 1, len(prompt)))
                scores[sequence.row] = tuple(PromptLogprob(p, prompt[p], -float(p)) for p in targets)
        slots = [s.state_slot for s in plan.sequences]
        assert not self.states or len(set(slots)) == len(slots), "two sequences run in one state slot"
        for copy in plan.state_saves:
            self.states[copy.dst] = self.states[copy.src]
        return StepResult(plan.step, sampled, scores)

    def _change_rows(self, plan: StepPlan) -> None:
        for row in plan.closes:
            assert self.rows.pop(row, None) is not None, "a row is closed that is not open"
        for opened in plan.opens:
            assert opened.row not in self.rows, "a row is opened twice"
            self.rows[opened.row] = opened
            if opened.output_ids:
                self.last[opened.row] = opened.output_ids[-1]

    def _move(self, plan: StepPlan) -> None:
        for handle in plan.swap_drop:
            del self.swapped[handle]
        for swap in plan.swap_out:
            held = [self._get(swap.block_ids, position) for position in range(swap.tokens)]
            self.swapped[swap.handle] = (held, None if swap.state_slot is None else self.states[swap.state_slot])
        for swap in plan.swap_in:
            held, state = self.swapped.pop(swap.handle)
            for position, value in enumerate(held):
                self._put(swap.block_ids, position, value)
            if swap.state_slot is not None:
                self.states[swap.state_slot] = state
        for copy in plan.block_copies:
            self.kv[copy.dst] = list(self.kv[copy.src])
        for copy in plan.state_loads:
            self.states[copy.dst] = self.states[copy.src]

    def _get(self, block_ids: Sequence[int], position: int) -> int | None:
        size = self._geometry.block_size
        return self.kv[block_ids[position // size]][position % size]

    def _put(self, block_ids: Sequence[int], position: int, value: int | None) -> None:
        size = self._geometry.block_size
        self.kv[block_ids[position // size]][position % size] = value

    def _before(self, block_ids: Sequence[int], start: int) -> int:
        if start == 0:
            return EMPTY
        digest = self._get(block_ids, start - 1)
        assert digest is not None, "a sequence goes on from memory that nobody wrote"
        return digest

    # KVTransfer: one layer, one head, the digest in one float64-safe integer tensor

    def read_kv(self, block_ids: Sequence[int], first: int, count: int) -> Tensor:
        values = [self._get(block_ids, position) or 0 for position in range(first, first + count)]
        return torch.tensor(values, dtype=torch.int64).reshape(1, 1, 1, count, 1).expand(1, 2, 1, count, 1).contiguous()

    def write_kv(self, block_ids: Sequence[int], first: int, packed: Tensor) -> None:
        for offset, value in enumerate(packed[0, 0, 0, :, 0].tolist()):
            self._put(block_ids, first + offset, value)

    def write(
        self,
        block_ids: Sequence[int],
        kv: Sequence[tuple[int, Tensor]],
        state_slot: int | None,
        state: dict[str, Tensor],
    ) -> int:
        if state_slot is not None:
            self.write_state(state_slot, state)
        for first, packed in kv:
            self.write_kv(block_ids, first, packed)
        return 0

    def settle(self) -> None:
        """Writes are done when they return."""

    def read_state(self, slot: int) -> dict[str, Tensor]:
        return {"ssm": torch.tensor([self.states[slot] or 0])} if self.states else {}

    def write_state(self, slot: int, tensors: dict[str, Any]) -> None:
        if self.states:
            self.states[slot] = int(tensors["ssm"][0])


class FakeSnapshots:
    """The part of `Snapshots` that the engine uses, over a dictionary. Saves at once, finds on the caller's thread."""

    def __init__(self, transfer: FakeExecutor) -> None:
        self.transfer = transfer
        self.saved: list[Capture] = []
        self.stored: dict[tuple[str, tuple[int, ...]], tuple[Capture, Tensor, dict[str, Tensor]]] = {}
        self.queries: list[RestoreQuery] = []
        self.answer: Callable[[RestoreQuery], Fetched | Miss] | None = None
        self.hold_releases = False
        self.held: list[Callable[[], None]] = []
        self.closed = False

    def save(self, capture: Capture) -> None:
        self.saved.append(capture)
        tokens = tuple(capture.token_ids[: capture.position])
        packed = self.transfer.read_kv(capture.block_ids, 0, capture.position)
        assert packed[0, 0, 0, -1, 0] == digest_of(tokens), "a capture does not hold what it says"
        state = self.transfer.read_state(capture.state_slot) if capture.state_slot is not None else {}
        if state:
            assert int(state["ssm"][0]) == digest_of(tokens), "a captured state is not exact at its position"
        self.stored[capture.tenant, tokens] = (capture, packed, state)
        if self.hold_releases:
            self.held.append(capture.release)
        else:
            capture.release()

    def find(self, query: RestoreQuery) -> Fetched | Miss:
        self.queries.append(query)
        if self.answer is not None:
            return self.answer(query)
        limit = len(query.token_ids) - 1 if query.max_position is None else query.max_position
        for position in range(limit, query.min_position, -1):
            found = self.stored.get((query.tenant, tuple(query.token_ids[:position])))
            if found is not None:
                return fetched(*found, kv_from=query.kv_from)
        return Miss("nothing is stored")

    def flush(self, deadline_seconds: float) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def fetched(capture: Capture, packed: Tensor, state: dict[str, Tensor], *, kv_from: int = 0) -> Fetched:
    """What the service would deliver for a stored capture."""
    kv = [(kv_from, packed[:, :, :, kv_from:])] if kv_from < capture.position else []
    return Fetched(
        snapshot_id=capture.snapshot_id,
        position=capture.position,
        kv=kv,
        state=state or None,
        tier="disk",
        bytes=packed.numel() * 8,
        milliseconds=1.0,
        conversation_id=capture.conversation_id,
        branch_name=capture.branch_name,
        turn_number=capture.turn_number,
        boundary=capture.boundary,
    )


class Letters:
    """A tokenizer whose every id is one character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(33 + token) for token in token_ids)

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 33 for character in text]
