"""Durability by policy: which turns are written out at once, which when a conversation falls silent.

With `save_turn_end` every turn becomes durable by itself. Without it, or with an idle time, the newest turn of a
conversation is made durable after that long without a request.
"""

from __future__ import annotations

import asyncio
import logging
import time

from engram_runtime.errors import EngramError
from engram_runtime.server.state import ServerState

log = logging.getLogger("engram.server")


class IdleSaver:
    """Watches the server's recent conversations and saves those that have been silent for long enough."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def run(self) -> None:
        idle = self._state.config.save_idle_seconds
        if idle <= 0:
            return
        while True:
            await asyncio.sleep(min(idle / 4, 5.0))
            await self.save_silent(time.monotonic() - idle)

    async def save_silent(self, before: float) -> int:
        """Save every conversation whose last turn ended before `before` (monotonic seconds); how many were saved."""
        loaded = self._state.loaded
        if loaded is None or loaded.snapshots is None:
            return 0
        saved = 0
        for tenant, conversation, branch in self._state.recent.take_silent(before):
            try:
                await asyncio.to_thread(loaded.snapshots.save_now, tenant, conversation, branch_name=branch)
                saved += 1
            except (EngramError, ValueError) as error:
                log.warning("idle conversation %s was not saved: %s", conversation, error)
        return saved
