"""The life of an activator process: two ports, drained on SIGTERM, gone in time."""

from __future__ import annotations

import asyncio
import logging
import signal
import time

import uvicorn
from starlette.types import ASGIApp

from engram_runtime.activator.app import Activator
from engram_runtime.activator.config import ActivatorConfig
from engram_runtime.server.listening import Uvicorn, listen

log = logging.getLogger("engram.activator")
LOOK_SECONDS = 0.05
GIVE_UP_SHARE = 0.8  # of the drain timeout: who still waits then is sent away, and has time to hear it


class ActivatorServer:
    """Binds its ports at once, so that one in use is an error at start."""

    def __init__(self, config: ActivatorConfig) -> None:
        self.config = config
        self._stop = asyncio.Event()
        self.sockets = (listen(config.host, config.port), listen(config.host, config.admin_port))

    @property
    def ports(self) -> tuple[int, int]:
        """(public, admin) as bound."""
        first, second = (int(sock.getsockname()[1]) for sock in self.sockets)
        return first, second

    def stop(self) -> None:
        """Drain and end."""
        self._stop.set()

    async def run(self, *, signals: bool = True) -> int:
        """Until it is stopped; the process's exit code."""
        loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        activator = Activator(self.config)
        servers = [_uvicorn(app, self.config) for app in (activator.public, activator.admin)]
        tasks = [
            asyncio.create_task(server.serve(sockets=[sock]))
            for server, sock in zip(servers, self.sockets, strict=True)
        ]
        log.info("listening on http://%s:%d, admin on port %d", self.config.host, *self.ports)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        activator.drain()
        await self._empty(activator, GIVE_UP_SHARE * self.config.drain_timeout)
        activator.give_up()
        drained = await self._empty(activator, max(1.0, (1 - GIVE_UP_SHARE) * self.config.drain_timeout))
        for server in servers:
            server.should_exit = True
            server.force_exit = not drained
        await asyncio.wait(tasks, timeout=5.0)
        stopping.cancel()
        await activator.close()
        return 0

    @staticmethod
    async def _empty(activator: Activator, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while activator.inside and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)
        return not activator.inside


def _uvicorn(app: ASGIApp, config: ActivatorConfig) -> Uvicorn:
    return Uvicorn(
        uvicorn.Config(
            app,
            interface="asgi3",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,  # the model's answers have one
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, int(config.drain_timeout)),
            ws="none",
        )
    )


def serve(config: ActivatorConfig) -> int:
    """Run until told to stop. ValueError for a port that is taken."""

    async def main() -> int:
        return await ActivatorServer(config).run()

    return asyncio.run(main())
