"""A server inside the process of `engram chat --model`: the same code path as `engram serve`, on a private port."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engram_runtime.cli.lazy import CommandError
from engram_runtime.cli.serving import engine_config
from engram_runtime.server.config import ServerConfig
from engram_runtime.server.lifecycle import Server

if TYPE_CHECKING:
    from engram_runtime.engine.async_engine import AsyncLLMEngine


@contextmanager
def embedded_server(options: argparse.Namespace) -> Iterator[str]:
    """Base URL of a server that lives as long as the context. Nothing is written to disk."""
    config = engine_config(options)
    # What fails in a known way is told once, by the CommandError below; a traceback is still shown.
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: bool(record.exc_info))
    logging.getLogger("engram").addHandler(handler)

    def load() -> AsyncLLMEngine:
        module = importlib.import_module("engram_runtime.engine.async_engine")
        engine: AsyncLLMEngine = module.AsyncLLMEngine.from_config(config, None)
        return engine

    name = Path(options.model).resolve().name
    ready = threading.Event()
    servers: list[tuple[Server, asyncio.AbstractEventLoop]] = []

    def work() -> None:
        async def main() -> int:
            server = Server(ServerConfig(served_model_name=name, port=0, admin_port=0, drain_timeout=2.0), load)
            servers.append((server, asyncio.get_running_loop()))
            ready.set()
            return await server.run(signals=False)

        asyncio.run(main())

    thread = threading.Thread(target=work, name="engram-server", daemon=True)
    thread.start()
    ready.wait()
    server, loop = servers[0]
    try:
        while server.state.admission.phase == "loading":
            thread.join(0.05)
        if server.state.admission.phase != "ready":
            raise CommandError(server.state.admission.reason)
        yield f"http://127.0.0.1:{server.ports[0]}"
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(server.stop)
            thread.join(10.0)
