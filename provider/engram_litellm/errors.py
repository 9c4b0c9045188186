"""Errors that need no litellm: the snapshot client's, discovery's and the one that says how to get the provider."""

from __future__ import annotations


class SnapshotError(Exception):
    """A snapshot call failed. `status_code` is the HTTP status, 0 when no answer came."""

    def __init__(self, message: str, conversation_id: str = "", status_code: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.conversation_id = conversation_id
        self.status_code = status_code


class SaveError(SnapshotError):
    """Saving failed."""


class RestoreError(SnapshotError):
    """Restoring failed."""


class NoEndpoint(Exception):
    """No replica of the model is known; the message says where was looked."""


class MissingExtra(ImportError):
    """A part of the package was asked for whose optional dependency is not installed."""


def missing_litellm(what: str) -> MissingExtra:
    """The error for `what` when litellm is not installed."""
    return MissingExtra(f'{what} needs litellm: pip install "engram-platform[litellm]"')
