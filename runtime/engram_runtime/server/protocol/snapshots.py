"""Bodies of the snapshot calls."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engram_runtime.server.protocol.common import MAX_INT, Wire

MAX_TTL_SECONDS = 100 * 365 * 86400


class SaveRequest(Wire):
    """Make a turn's newest snapshot durable, and label it."""

    conversation_id: str
    turn_number: int | None = Field(None, ge=0, le=MAX_INT, description="Default: the newest turn of the branch.")
    branch_name: str = "main"
    tag: str | None = Field(None, min_length=1)
    pin: bool | None = None
    ttl: int | None = Field(None, ge=1, le=MAX_TTL_SECONDS, description="Seconds from now.")


class RestoreRequest(Wire):
    """head: later turns of the branch continue here. prefetch: bring the bytes to host memory now."""

    action: Literal["head", "prefetch"] = "head"
