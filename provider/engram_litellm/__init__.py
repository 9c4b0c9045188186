"""LiteLLM provider and snapshot client of Engram.

    import engram_litellm, litellm
    litellm.completion(model="engram/NAME", messages=[...])

Importing the package registers the provider when litellm is installed. Without litellm the package is the snapshot
client alone, and says how to get the rest when it is asked for.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from engram_litellm.errors import RestoreError, SaveError, SnapshotError, missing_litellm
from engram_litellm.metadata import EngramStateMetadata
from engram_litellm.snapshot_client import SnapshotClient, SyncSnapshotClient
from engram_litellm.snapshot_types import (
    DeleteSnapshotResponse,
    RestoreSnapshotResponse,
    SaveSnapshotResponse,
    SnapshotMetadata,
)

__all__ = [
    "DeleteSnapshotResponse",
    "EngramChatConfig",
    "EngramLLM",
    "EngramStateMetadata",
    "RestoreError",
    "RestoreSnapshotResponse",
    "SaveError",
    "SaveSnapshotResponse",
    "SnapshotClient",
    "SnapshotError",
    "SnapshotMetadata",
    "SyncSnapshotClient",
    "engram",
]

if find_spec("litellm") is not None:
    from engram_litellm.chat_config import EngramChatConfig
    from engram_litellm.provider import EngramLLM, register

    engram = EngramLLM()
    register(engram)
else:

    def __getattr__(name: str) -> Any:
        if name in ("EngramChatConfig", "EngramLLM", "engram"):
            raise missing_litellm(f"engram_litellm.{name}")
        raise AttributeError(f"module 'engram_litellm' has no attribute {name!r}")
