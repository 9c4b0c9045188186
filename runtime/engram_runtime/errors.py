"""Errors that cross a layer: each tells the layer above what to do, its message tells the user what to change."""

from __future__ import annotations


class EngramError(Exception):
    """Base of what the runtime raises on purpose."""


class CheckpointError(EngramError):
    """A model checkpoint is missing something, holds something unknown, or is damaged."""


class CapacityError(EngramError, ValueError):
    """A request can never fit this engine (not: does not fit now). The caller's mistake, hence a ValueError."""


class EngineDeadError(EngramError):
    """The engine stopped after a failed step, or was closed; it takes no more requests."""


class SnapshotError(EngramError):
    """A snapshot could not be saved, read or trusted."""


class NotFound(SnapshotError):
    """The named snapshot, conversation or object does not exist, for this tenant."""


class Deleted(NotFound):
    """It did exist, and is gone for good: deleted, by whichever replica, or past its expiry."""


class Conflict(SnapshotError):
    """Somebody else moved what this operation meant to move."""
