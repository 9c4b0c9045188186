"""kopf as the watcher: it lists and watches, and hands every object on. Nothing of kopf is known above this module.

Only event handlers are used: they write nothing to the objects, no finalizer and no annotation. kopf's indexes would
hold all handlers back until everything is listed, but at a cost that grows with the square of the objects: 5,500 took
minutes. When the cache is complete is the audit's to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf

from engram_operator.kube.audit import Watch
from engram_operator.kube.kinds import Kind

log = logging.getLogger(__name__)

Event = Callable[[Kind, str | None, Mapping[str, Any]], None]  # kind, type (None: listed), object
# The server's address and how to ask it, given who is told the path of each list that was answered.
Connect = Callable[[Callable[[str], None]], Awaitable[tuple[str, aiohttp.ClientSession]]]

SERVER_TIMEOUT_S = 300  # the API server ends a watch after this; the next one goes on where it was


class WatchesEnded(Exception):
    """Nothing is watched any more: only a new process helps, which begins with listing everything."""


class _Backoffs:
    """Delays without end: a watch that gave up would be an operator that is deaf."""

    def __iter__(self) -> Iterator[float]:
        delay = 0.5
        while True:
            yield delay
            delay = min(delay * 2, 5.0)


class _NothingKept(kopf.DiffBaseStorage):
    """kopf compares each object with its last state for handlers that we have none of; this spares the copies."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        raise NotImplementedError("no handler of this operator has a state")


@dataclass(slots=True)
class Watches:
    """`event(kind, type, object)` is called for every object that is listed, changed or deleted; `listed(kind)` when a
    watch has begun anew with a list, which tells of no object when it is empty.

    `canary` is what to watch of the own Lease: `alive()` is told of it.
    """

    watches: Sequence[Watch]
    canary: Watch
    namespaces: Sequence[str]
    connect: Connect
    event: Event
    listed: Callable[[Kind], None]
    alive: Callable[[], None]

    async def run(self, stop: asyncio.Event, started: Callable[[], None] = lambda: None) -> None:
        """Until `stop` is set. Anything else that ends it is an exception. `started` is called when kopf's tasks are
        there; kopf takes over SIGTERM and SIGINT, and `started` can take them back."""
        before = asyncio.all_tasks()  # what kopf finds beyond these in the end, it takes for its own and cancels
        kopf_scope: dict[str, Any] = {"namespaces": list(self.namespaces)} if self.namespaces else {"clusterwide": True}
        tasks: Any = await kopf.spawn_tasks(
            registry=self._registry(), settings=self._settings(), standalone=True, stop_flag=stop, **kopf_scope
        )
        started()
        try:
            await kopf.run_tasks(tasks, ignored=before)
        except Exception as error:
            if not stop.is_set():
                raise WatchesEnded(f"a watch could not go on: {error or type(error).__name__}") from error
            log.debug("kopf did not stop cleanly", exc_info=error)
        if not stop.is_set():
            raise WatchesEnded("kopf ended by itself")

    def _settings(self) -> Any:
        settings = kopf.OperatorSettings()
        settings.peering.standalone = True
        settings.scanning.disabled = True
        settings.posting.enabled = False
        settings.networking.request_timeout = 30.0
        settings.networking.connect_timeout = 5.0
        settings.networking.error_backoffs = _Backoffs()
        settings.networking.trust_env = True
        settings.watching.server_timeout = SERVER_TIMEOUT_S
        settings.watching.reconnect_backoff = 0.2
        settings.queueing.idle_timeout = 1.0
        settings.queueing.error_delays = (1, 1, 2, 3, 5, 8, 13, 21, 30)
        settings.persistence.diffbase_storage = _NothingKept()
        settings.process.ultimate_exiting_timeout = None  # it would kill the process, and has no way to be called off
        for watch in (*self.watches, self.canary):
            where = watch.kind.api_version, watch.kind.plural
            if watch.labels:
                settings.watching.label_selectors[where] = watch.labels
            if watch.fields:
                settings.watching.field_selectors[where] = watch.fields
        return settings

    def _registry(self) -> Any:
        registry = kopf.OperatorRegistry()
        kopf.on.login(id="login", registry=registry)(self._login)
        for watch in self.watches:
            where = watch.kind.api_version, watch.kind.plural
            kopf.on.event(*where, id=f"event-{watch.kind.plural}", registry=registry)(self._event(watch.kind))
        kind = self.canary.kind

        async def renewed(**_: Any) -> None:
            self.alive()

        kopf.on.event(kind.api_version, kind.plural, id="canary", registry=registry)(renewed)
        return registry

    def _event(self, kind: Kind) -> Any:
        async def changed(event: Mapping[str, Any], **_: Any) -> None:
            self.event(kind, event["type"], event["object"])

        return changed

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        kinds = {watch.kind.path(where): watch.kind for watch in self.watches for where in self.namespaces or (None,)}

        def listed(path: str) -> None:
            if (kind := kinds.get(path)) is not None:
                self.listed(kind)

        server, session = await self.connect(listed)
        return kopf.AiohttpSession(server=server, aiohttp_session=session)
