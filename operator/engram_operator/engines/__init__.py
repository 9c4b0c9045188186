"""The operator's side of the engines' admin port: a bounded, typed HTTP client.

An engine runs a user's model in a user's namespace, so nothing it answers is trusted: sizes are bounded before they are
read, every field is checked, and what is unreadable is an error of its own, never a fact about the store.
"""

from engram_operator.engines.client import Engines
from engram_operator.engines.errors import (
    EngineAnswerError,
    EngineBusy,
    EngineError,
    EngineInvalid,
    EngineNotFound,
    EngineRefused,
    EngineUnreachable,
    StoreTrouble,
)
from engram_operator.engines.pods import EnginePod, engine_pods, ranked
from engram_operator.engines.types import (
    EngineStatus,
    EventPage,
    SaveRequest,
    SnapshotCounts,
    SnapshotEvent,
    SnapshotPage,
    StoreCondition,
    StoredSnapshot,
    SweepReport,
    Waiting,
)

__all__ = [
    "EngineAnswerError",
    "EngineBusy",
    "EngineError",
    "EngineInvalid",
    "EngineNotFound",
    "EnginePod",
    "EngineRefused",
    "EngineStatus",
    "EngineUnreachable",
    "Engines",
    "EventPage",
    "SaveRequest",
    "SnapshotCounts",
    "SnapshotEvent",
    "SnapshotPage",
    "StoreCondition",
    "StoreTrouble",
    "StoredSnapshot",
    "SweepReport",
    "Waiting",
    "engine_pods",
    "ranked",
]
