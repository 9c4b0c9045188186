"""Durability by policy: which turns are written out when they end, and which when their conversation falls silent.

With `save_turn_end` every turn becomes durable by itself, a conversation at most once per `save_min_interval_seconds`.
What that leaves in host memory is written after `save_idle_seconds` without a request, or when the server drains.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import TypeAlias

from engram_runtime.errors import EngramError
from engram_runtime.server.config import ServerConfig
from engram_runtime.snapshots.types import Snapshots

log = logging.getLogger("engram.server")
Branch: TypeAlias = tuple[str, str, str]
"""Tenant, conversation, branch."""
MAX_BRANCHES = 65536


class SavePolicy:
    """Decides per turn and remembers what is waiting. One event loop; forgetting a branch saves it once too often."""

    def __init__(self, config: ServerConfig) -> None:
        self._at_turn_end = config.save_turn_end
        self._interval = config.save_min_interval_seconds
        self._idle = config.save_idle_seconds
        self._saved: OrderedDict[Branch, float] = OrderedDict()
        self._waiting: OrderedDict[Branch, float] = OrderedDict()

    def durable(self, tenant: str, conversation: str | None, branch: str) -> bool:
        """Whether the turn that begins now is to be written when it ends."""
        if not self._at_turn_end:
            return False
        saved = self._saved.get((tenant, conversation or "", branch))
        return saved is None or time.monotonic() - saved >= self._interval

    def ended(self, branch: Branch, durable: bool) -> None:
        """A turn has ended. A turn that is not durable waits for the silence after it."""
        table = self._saved if durable else self._waiting
        if durable:
            self._waiting.pop(branch, None)
        table[branch] = time.monotonic()
        table.move_to_end(branch)
        if len(table) > MAX_BRANCHES:
            table.popitem(last=False)

    async def run(self, service: Snapshots) -> None:
        """Save silent conversations for ever; returns at once where the policy knows no idle time."""
        if self._idle <= 0:
            return
        while True:
            await asyncio.sleep(min(self._idle / 4, 5.0))
            await self.save_silent(service, time.monotonic() - self._idle)

    async def save_silent(self, service: Snapshots, before: float) -> int:
        """Save every waiting conversation whose last turn ended before `before` (monotonic seconds); how many."""
        silent = [branch for branch, ended in self._waiting.items() if ended < before]
        saved = 0
        for branch in silent:
            del self._waiting[branch]
            tenant, conversation, name = branch
            try:
                await asyncio.to_thread(service.save_now, tenant, conversation, branch_name=name)
                self._saved[branch] = time.monotonic()
                saved += 1
            except (EngramError, ValueError) as error:
                log.warning("idle conversation %s was not saved: %s", conversation, error)
        return saved
