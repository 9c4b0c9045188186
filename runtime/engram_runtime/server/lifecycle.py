"""The life of a server process: ports open at once, model loaded beside them, drained on SIGTERM, gone in time.

Probes and clients get an honest answer from the first moment. The first SIGTERM (or Ctrl+C) closes the door and lets
running turns finish; the second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from engram_runtime.errors import EngramError
from engram_runtime.server.app import admin_app, public_app
from engram_runtime.server.config import ServerConfig
from engram_runtime.server.listening import Uvicorn, listen
from engram_runtime.server.state import ServerState

if TYPE_CHECKING:
    from engram_runtime.engine.async_engine import AsyncLLMEngine

log = logging.getLogger("engram.server")
LoadEngine = Callable[[], "AsyncLLMEngine"]
FAILED = 1
KILLED = 130
KILL_SECONDS = 5.0


class Server:
    """Two ports and one engine. `run` returns the process's exit code."""

    def __init__(self, config: ServerConfig, load_engine: LoadEngine) -> None:
        self.config = config
        self.state = ServerState.of(config)
        self._load_engine = load_engine
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._failure: BaseException | None = None
        self._loader: threading.Thread | None = None
        # Bound here, so that a port in use is an error before anything is loaded.
        self.sockets = (
            listen(config.host, config.port),
            listen(config.admin_host or config.host, config.admin_port),
        )

    @property
    def ports(self) -> tuple[int, int]:
        """(public, admin) as bound."""
        first, second = (int(sock.getsockname()[1]) for sock in self.sockets)
        return first, second

    @property
    def loading(self) -> bool:
        """Whether the thread that loads the engine still works, even though nobody waits for it any more."""
        return self._loader is not None and self._loader.is_alive()

    def stop(self) -> None:
        """Drain; the second time, end at once."""
        if self._stop.is_set():
            self._kill.set()
        else:
            self._stop.set()

    def _signalled(self) -> None:
        if self._stop.is_set():
            # Whatever the engine's threads are doing then, the process is gone after this.
            last = threading.Timer(KILL_SECONDS, os._exit, (KILLED,))
            last.daemon = True
            last.start()
        self.stop()

    async def run(self, *, signals: bool = True) -> int:
        loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled)
        servers = [_uvicorn(app, self.config) for app in (public_app(self.state), admin_app(self.state))]
        tasks = [
            asyncio.create_task(server.serve(sockets=[sock]))
            for server, sock in zip(servers, self.sockets, strict=True)
        ]
        log.info("listening on http://%s:%d, admin on port %d", self.config.host, *self.ports)
        loading = asyncio.create_task(self._load())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and self._failure is None:
            idle = asyncio.create_task(self._save_idle())
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
        drained = await self._drain() if self._failure is None else False
        for server in servers:
            server.should_exit = True
            server.force_exit = not drained
        await asyncio.wait(tasks, timeout=5.0)
        if self.state.loaded is not None:
            self.state.loaded.renderer.close()
            await self.state.loaded.engine.aclose()
        if self._failure is not None:
            return FAILED
        return KILLED if self._kill.is_set() else 0

    async def _load(self) -> None:
        """Load on a daemon thread: a signal must be able to end the process in the middle of it."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[AsyncLLMEngine] = loop.create_future()

        def settle(engine: AsyncLLMEngine | None, error: BaseException | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            elif engine is not None:
                result.set_result(engine)

        def work() -> None:
            engine, problem = None, None
            try:
                engine = self._load_engine()
            except BaseException as error:
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
                loop.call_soon_threadsafe(settle, engine, problem)

        started = time.monotonic()
        self._loader = threading.Thread(target=work, name="engram-load", daemon=True)
        self._loader.start()
        try:
            engine = await result
            self.state.attach(engine)
        except Exception as error:
            self._failure = error
            self.state.admission.move("failed", f"the model did not load: {error}")
            log.error("the model did not load: %s", error, exc_info=not isinstance(error, ValueError | EngramError))
            return
        log.info("ready after %.1f s", time.monotonic() - started)

    async def _save_idle(self) -> None:
        service = self.state.loaded.snapshots if self.state.loaded is not None else None
        if service is not None:
            await self.state.saving.run(service)

    async def _drain(self) -> bool:
        """Let running turns finish and flush snapshots, within the drain timeout; True when all was done."""
        state = self.state
        state.admission.move("draining", "the server is stopping")
        for task in list(state.background):
            task.cancel()
        if state.loaded is None:
            return True
        started = time.monotonic()
        budget = self.config.drain_timeout
        # What is left of a turn comes first; a fifth of the time stays for the snapshots.
        finishing = asyncio.create_task(state.admission.wait_empty(0.8 * budget))
        killed = asyncio.create_task(self._kill.wait())
        await asyncio.wait({finishing, killed}, return_when=asyncio.FIRST_COMPLETED)
        if killed.done():
            finishing.cancel()
            return False
        log.info("drain: %d sequences left after %.1f s", state.admission.inside, time.monotonic() - started)
        if not self.config.save_on_drain and not state.admission.inside:
            killed.cancel()
            return True
        flushing = asyncio.create_task(state.loaded.engine.drain(max(budget - (time.monotonic() - started), 0.1)))
        await asyncio.wait({flushing, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if not flushing.done():
            flushing.cancel()
            return False
        complete = flushing.exception() is None and flushing.result()
        # Aborted turns still have a last event to send.
        await state.admission.wait_empty(1.0)
        return bool(complete)


def _uvicorn(app: FastAPI, config: ServerConfig) -> Uvicorn:
    return Uvicorn(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, int(config.drain_timeout)),
            ws="none",
        )
    )


def serve(config: ServerConfig, load_engine: LoadEngine) -> int:
    """Run until told to stop; the process's exit code. ValueError for a port that is taken."""

    async def main() -> tuple[int, bool]:
        server = Server(config, load_engine)
        return await server.run(), server.loading

    code, loading = asyncio.run(main())
    if loading:
        # The interpreter's end would unwind a thread that is inside torch, which aborts the process.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
