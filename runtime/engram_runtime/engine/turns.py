"""What a turn of a conversation asks of the engine, and what the engine reports back: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BOUNDARY_KINDS = ("user_start", "history", "turn_end", "next_history")


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One turn, as the server understood it.

    `boundaries` maps "user_start" and "history" to token positions inside the prompt, each at most its length - 1.
    `candidates` are positions where an anchor may exist, most promising first. `messages` is the canonical JSON of
    the conversation so far, stored with the snapshot. `restore_from` is a resolved snapshot id.
    """

    tenant: str = "default"
    conversation_id: str | None = None
    """None: that of the restored base, else a new random id."""
    branch_name: str = "main"
    turn_number: int | None = None
    """None: the restored base's + 1, else 1."""
    boundaries: Mapping[str, int] = field(default_factory=dict)
    answered: int | None = None
    """A turn whose `history` ends here or before has its answer in the prompt. None: at "user_start"; not so where
    something else than a user's message follows the last answer, as a tool's result does."""
    candidates: tuple[int, ...] = ()
    restore: bool = True
    save: bool = True
    durable: bool = True
    """False: the turn stays in host memory until a save call, an idle time or a drain makes it durable."""
    restore_from: str | None = None
    messages: bytes | None = None
    tokenizer_digest: str = ""
    template_digest: str = ""
    pin: bool = False
    tag: str | None = None
    ttl_seconds: int | None = None


@dataclass(slots=True)
class TurnReport:
    """What happened to the turn's memory. Token counts are prompt tokens; times are milliseconds.

    restored = taken over from any tier; prefilled = computed in the foreground; rewarmed = computed in the background,
    for a turn: since the conversation's last one; recomputed = computed again after a preemption that found no room
    to swap.
    """

    conversation_id: str
    branch_name: str
    turn_number: int
    snapshot_id: str | None = None
    """Id of the snapshot this turn leaves behind; known before it is durable."""
    boundary: str | None = None
    restored_tokens: int = 0
    prefilled_tokens: int = 0
    rewarmed_tokens: int = 0
    recomputed_tokens: int = 0
    tier: str | None = None
    """Coldest tier that gave tokens: "gpu", "host", "disk" or "store"."""
    bytes: int = 0
    restore_time_ms: float = 0.0
    restore_failed: bool = False
    restore_error: str | None = None
    auto_save: bool = True
