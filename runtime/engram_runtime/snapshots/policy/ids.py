"""Names that people and clients give: checked here once, and never part of a path.

Everything that reaches a store is hexadecimal derived from these (an HMAC or a random id), so a conversation id may
hold any printable text without being able to name a file.
"""

from __future__ import annotations

import re
import secrets
import time

_ID = re.compile(r"[0-9a-f]{32}")
_BRANCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
_CLOCK_MASK = (1 << 48) - 1
MAX_CONVERSATION_ID = 256
MAX_TENANT = 256
MAX_TAG = 128


def new_id(now: float | None = None) -> str:
    """A new 128-bit id, 32 lower-case hex digits: 48 bits of inverted milliseconds, then 80 random bits.

    Object stores list in ascending key order only, so the inverted clock makes a plain listing newest first. The random
    part keeps an id unguessable; authority never rests on it (ids are looked up inside a tenant's namespace).
    """
    milliseconds = int((time.time() if now is None else now) * 1000)
    return f"{_CLOCK_MASK - (milliseconds & _CLOCK_MASK):012x}{secrets.token_hex(10)}"


def id_time(value: str) -> float:
    """Unix seconds at which new_id() made `value` (meaningless for an id made otherwise)."""
    return (_CLOCK_MASK - int(value[:12], 16)) / 1000


def id_floor(when: float) -> str:
    """The smallest id that new_id() can have made at `when`: every id made later sorts before it."""
    return f"{_CLOCK_MASK - (int(when * 1000) & _CLOCK_MASK):012x}{'0' * 20}"


def is_id(value: str) -> bool:
    return _ID.fullmatch(value) is not None


def check_snapshot_id(value: str) -> str:
    """ValueError unless `value` is 32 lower-case hex digits."""
    if not isinstance(value, str) or not is_id(value):
        raise ValueError(f"snapshot_id must be 32 lower-case hex digits, got {_shown(value)}")
    return value


def check_conversation_id(value: str) -> str:
    return _check_text("conversation_id", value, MAX_CONVERSATION_ID)


def check_tenant(value: str) -> str:
    return _check_text("tenant", value, MAX_TENANT)


def check_tag(value: str) -> str:
    return _check_text("tag", value, MAX_TAG)


def check_branch_name(value: str) -> str:
    """ValueError unless letters, digits and ._~- (1 to 128, first one a letter or digit)."""
    if not isinstance(value, str) or _BRANCH.fullmatch(value) is None:
        raise ValueError(f"branch_name must be 1 to 128 letters, digits or . _ ~ -, got {_shown(value)}")
    return value


def losing_branch(branch_name: str) -> str:
    """The name of the branch that a writer opens when another one moved the head of `branch_name` first."""
    stem = branch_name.split("~", 1)[0][:100]
    return f"{stem}~{secrets.token_hex(6)}"


def _check_text(field: str, value: str, limit: int) -> str:
    if not isinstance(value, str) or not value or len(value) > limit:
        raise ValueError(f"{field} must be 1 to {limit} characters, got {_shown(value)}")
    if not value.isprintable() or value != value.strip():
        raise ValueError(f"{field} must be printable text without surrounding space, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
