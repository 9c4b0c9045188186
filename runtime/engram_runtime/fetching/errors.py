"""Why a checkpoint could not be brought."""

from __future__ import annotations


class FetchError(Exception):
    """`reason` is a CamelCase word for conditions. `passing`: another try may help, after `retry_after` seconds."""

    def __init__(self, reason: str, message: str, *, passing: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.passing = passing
        self.retry_after = retry_after
