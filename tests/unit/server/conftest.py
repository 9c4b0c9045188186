"""One fake engine per test and an HTTP client that calls the application in process."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import httpx
import pytest

from engram_runtime.server.app import admin_app, public_app
from engram_runtime.server.config import ServerConfig
from engram_runtime.server.state import ServerState
from tests.support import patience
from tests.support.fake_engine import FakeEngine
from tests.support.fake_snapshots import FakeSnapshots
from tests.support.tiny import make_tokenizer

NAME = "tiny"


@lru_cache
def tokenizer(template: str) -> Any:
    """Training one takes longer than most tests; the server only reads it."""
    return make_tokenizer(template=template)


class Api:
    """The public and the admin application over one fake engine."""

    def __init__(
        self, template: str = "tools", *, client: str = "127.0.0.1", engine: Any = None, **config: Any
    ) -> None:
        self.engine: FakeEngine = engine or FakeEngine(tokenizer(template), snapshots=FakeSnapshots())
        limits = {"render_timeout": patience.SECONDS, "body_timeout": patience.SECONDS}
        self.state = ServerState.of(ServerConfig(**{"served_model_name": NAME, **limits, **config}))
        self.state.attach(self.engine)
        self.http = self._client(public_app(self.state), client)
        self._from = client

    @cached_property
    def admin(self) -> httpx.AsyncClient:
        return self._client(admin_app(self.state), self._from)

    @staticmethod
    def _client(app: Any, client: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=app, client=(client, 1234), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://engine")

    @property
    def snapshots(self) -> FakeSnapshots:
        return self.engine.snapshots

    async def chat(self, content: Any = "Hello there", **fields: Any) -> httpx.Response:
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        headers = fields.pop("headers", None)
        body = {"model": NAME, "messages": messages, **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def complete(self, prompt: Any = "Hello there", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", None)
        return await self.http.post(
            "/v1/completions", json={"model": NAME, "prompt": prompt, **fields}, headers=headers
        )

    async def settle(self) -> None:
        """Wait for the background work of finished turns."""
        while self.state.background:
            for task in list(self.state.background):
                await task


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def make_api() -> type[Api]:
    return Api
