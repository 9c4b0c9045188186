"""Time limits of the product for tests that are not about them: a busy machine must not make one of them pass."""

from __future__ import annotations

from typing import Any

SECONDS = 600.0
ENGINE: dict[str, Any] = {"restore_timeout_seconds": SECONDS}
"""Of EngineConfig."""
ONE_SNAPSHOT: dict[str, Any] = {"turn_end_grace_seconds": SECONDS}
"""Of EngineConfig, where a server warms up each turn for its successor: one snapshot a turn, however late it does."""
SNAPSHOTS: dict[str, Any] = {"restore_deadline_seconds": SECONDS}
"""Of SnapshotConfig."""
S3: dict[str, Any] = {"connect_timeout_seconds": 60.0, "read_timeout_seconds": 60.0, "deadline_seconds": SECONDS}
"""Of S3Options."""
