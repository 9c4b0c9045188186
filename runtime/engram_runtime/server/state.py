"""What the routes share: configuration from the start, the engine once it has loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request

from engram_runtime.server.admin_auth import AdminDoor
from engram_runtime.server.admission import Admission
from engram_runtime.server.chat import ChatRenderer
from engram_runtime.server.config import ServerConfig
from engram_runtime.server.conversation import RecentTurns
from engram_runtime.server.dates import PinnedDates
from engram_runtime.server.errors import ApiError
from engram_runtime.server.metrics import Metrics
from engram_runtime.server.saving import SavePolicy
from engram_runtime.server.tenants import Principal, Tenants
from engram_runtime.server.tokens import TokenTable
from engram_runtime.snapshots.types import Snapshots

if TYPE_CHECKING:
    from engram_runtime.engine.async_engine import AsyncLLMEngine

MAX_BACKGROUND = 256


@dataclass(frozen=True, slots=True)
class Loaded:
    """What exists once the model is in memory."""

    engine: AsyncLLMEngine
    renderer: ChatRenderer
    tokens: TokenTable

    @property
    def snapshots(self) -> Snapshots | None:
        service: Snapshots | None = self.engine.snapshots
        return service


@dataclass(slots=True)
class ServerState:
    """One server. Used from one event loop."""

    config: ServerConfig
    admission: Admission
    tenants: Tenants
    admin: AdminDoor
    metrics: Metrics
    recent: RecentTurns
    dates: PinnedDates
    saving: SavePolicy
    created: int = field(default_factory=lambda: int(time.time()))
    loaded: Loaded | None = None
    background: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    def of(cls, config: ServerConfig) -> ServerState:
        tenants = Tenants(config.api_keys_dir)
        return cls(
            config=config,
            admission=Admission(max_running=config.max_num_seqs, max_queue=config.max_queue),
            tenants=tenants,
            admin=AdminDoor(tenants, config.admin_accounts),
            metrics=Metrics(),
            recent=RecentTurns(config.recent_bytes),
            dates=PinnedDates(),
            saving=SavePolicy(config),
        )

    def attach(self, engine: AsyncLLMEngine) -> None:
        """The model is loaded: open the door."""
        self.loaded = Loaded(
            engine=engine,
            renderer=ChatRenderer(
                engine.tokenizer,
                max_model_len=engine.max_model_len,
                workers=self.config.render_workers,
                timeout_seconds=self.config.render_timeout,
                on_boundary_error=self.metrics.boundary_error,
            ),
            tokens=TokenTable(engine.tokenizer),
        )
        self.metrics.attach(engine, lambda: self.admission.inside)
        self.admission.move("ready", "ready")

    def serving(self) -> Loaded:
        """ApiError 503 while loading, draining or dead."""
        self.admission.check_open()
        loaded = self.loaded
        assert loaded is not None
        if loaded.engine.error is not None:
            raise ApiError(503, f"the engine stopped: {loaded.engine.error}", code="engine_dead", retry_after=5)
        return loaded

    def service(self) -> Snapshots:
        """The snapshot service, also while draining; 503 while loading, 404 where snapshots are off."""
        if self.loaded is None:
            self.admission.check_open()
        assert self.loaded is not None
        if self.loaded.snapshots is None:
            raise ApiError(404, "snapshots are off on this server", code="snapshots_disabled")
        return self.loaded.snapshots

    def spawn(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run in the background; refused (and closed) when too much already does."""
        if len(self.background) >= MAX_BACKGROUND or self.admission.phase != "ready":
            work.close()
            return False
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return True


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def principal_of(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal
