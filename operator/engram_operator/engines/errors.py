"""What can go wrong on the way to an engine, told apart by what the operator does next.

Each error carries a CamelCase `reason` for conditions and a bounded `message` that holds no query strings, addresses of
other systems' credentials or text of a user's conversation.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base. `reason` is a CamelCase word for a condition."""

    reason = "EngineError"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason


class EngineUnreachable(EngineError):
    """No answer in time, or no connection: ask another replica, or come back."""

    reason = "EngineUnreachable"


class EngineBusy(EngineError):
    """The engine is loading, draining or full: come back after `retry_after_s`."""

    reason = "EngineBusy"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRefused(EngineError):
    """401 or 403: the engine does not know this operator, or the operator has no token."""

    reason = "EngineRefused"


class EngineNotFound(EngineError):
    """The engine answered that what was named does not exist, in the shape it uses for that; no other 404 counts."""

    reason = "NotFound"


class EngineInvalid(EngineError):
    """The engine says that the request itself is wrong; asking again cannot help."""

    reason = "Invalid"


class StoreTrouble(EngineError):
    """The engine is well and its store is not: `reason` is the store's own (AccessDenied, BucketNotFound, ...)."""

    reason = "StoreUnavailable"


class EngineAnswerError(EngineError):
    """An answer that cannot be read: too big, not JSON, fields missing or out of range, an unknown status."""

    reason = "UnreadableAnswer"
