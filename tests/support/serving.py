"""A real uvicorn on loopback in a thread of the test process, for tests that talk HTTP to the server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from engram_runtime.server.config import ServerConfig
from engram_runtime.server.lifecycle import Server

NAME = "tiny"


class Running:
    """A server that runs in its own thread and event loop."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.code: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.ports[0]}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.server.ports[1]}"

    def _main(self) -> None:
        async def main() -> int:
            self.loop = asyncio.get_running_loop()
            return await self.server.run(signals=False)

        self.code = asyncio.run(main())

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a plain function on the server's loop and return its result."""

        async def work() -> Any:
            return function(*args)

        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(120)

    def wait(self, phase: str, timeout: float = 240.0) -> None:
        deadline = time.monotonic() + timeout
        while self.server.state.admission.phase != phase:
            if time.monotonic() > deadline:
                raise AssertionError(f"still {self.server.state.admission.phase}, not {phase}")
            time.sleep(0.005)

    def stop(self) -> None:
        if self.loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop is closed: it has stopped, and the thread is about to end
                self.loop.call_soon_threadsafe(self.server.stop)

    def join(self, timeout: float = 120.0) -> int | None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the server did not stop"
        return self.code


@contextmanager
def serving(load: Callable[[], Any], *, wait: str | None = "ready", **config: Any) -> Iterator[Running]:
    """Serve `load()` on two free ports; ServerConfig fields as keywords."""
    values: dict[str, Any] = {"served_model_name": NAME, "port": 0, "admin_port": 0, "drain_timeout": 5.0, **config}
    running = Running(Server(ServerConfig(**values), load))
    try:
        while running.loop is None:
            time.sleep(0.001)
        if wait is not None:
            running.wait(wait)
        yield running
    finally:
        if running.code is None:
            running.stop()
            time.sleep(0.01)
            running.stop()
            running.join()
