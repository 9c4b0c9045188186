"""Clients of the snapshot calls, async and sync. They need httpx only: no litellm is imported for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TypeVar

import httpx

from engram_litellm import snapshot_api as api
from engram_litellm.discovery.endpoints import base_url
from engram_litellm.errors import RestoreError, SaveError, SnapshotError
from engram_litellm.settings import Settings
from engram_litellm.snapshot_types import (
    DeleteSnapshotResponse,
    RestoreSnapshotResponse,
    SaveSnapshotResponse,
    SnapshotMetadata,
)
from engram_litellm.transport import Clients, limits

_T = TypeVar("_T")
TIMEOUT = 60.0  # seconds


class _Configured:
    """Address and headers, from the arguments or else the environment. ValueError when no address is known."""

    def __init__(self, api_base: str | None, api_key: str | None, headers: Mapping[str, str] | None) -> None:
        settings = Settings.from_env()
        address = api_base or settings.api_base
        if not address:
            raise ValueError("api_base must be given, or set ENGRAM_API_BASE")
        self._ca_file = settings.ca_file
        self._base = f"{base_url(address)}/v1"
        key = api_key or settings.api_key
        self._headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}


class SnapshotClient(_Configured):
    """The five calls as coroutines. `client` replaces the connections that are made otherwise, one pool per event loop.

    Every failure, of the transport too, is a SnapshotError (SaveError, RestoreError) with the HTTP status.
    """

    def __init__(
        self,
        api_base: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__(api_base, api_key, headers)
        self._client = client
        self._clients = Clients(self._ca_file)

    async def save_snapshot(
        self,
        conversation_id: str,
        turn_number: int | None = None,
        branch_name: str | None = None,
        *,
        tag: str | None = None,
        pin: bool | None = None,
        ttl: int | None = None,
    ) -> SaveSnapshotResponse:
        """Make the newest snapshot of the conversation (or turn) durable now. `ttl` is in seconds."""
        steps = api.save(conversation_id, turn_number, branch_name, tag, pin, ttl)
        return await self._run(steps, conversation_id, SaveError)

    async def restore_snapshot(
        self, conversation_id: str, turn_number: int | None = None, branch_name: str | None = None
    ) -> RestoreSnapshotResponse:
        """Make a turn (default: the newest) the head of its branch, and bring its state to host memory."""
        return await self._run(api.restore(conversation_id, turn_number, branch_name), conversation_id, RestoreError)

    async def list_snapshots(
        self, conversation_id: str, branch_name: str | None = None, limit: int | None = None
    ) -> list[SnapshotMetadata]:
        """Newest first, of all branches by default; all of them without a `limit`."""
        return await self._run(api.list_all(conversation_id, branch_name, limit), conversation_id, SnapshotError)

    async def get_snapshot_info(
        self, conversation_id: str, turn_number: int | None = None, branch_name: str | None = None
    ) -> SnapshotMetadata:
        """The newest snapshot of a branch (default main), or of a turn on it."""
        return await self._run(api.info(conversation_id, turn_number, branch_name), conversation_id, SnapshotError)

    async def delete_snapshot(
        self, conversation_id: str, turn_number: int | None = None, branch_name: str | None = None
    ) -> DeleteSnapshotResponse:
        """Delete a turn (on main by default), a branch, or the whole conversation, in every tier."""
        return await self._run(api.delete(conversation_id, turn_number, branch_name), conversation_id, SnapshotError)

    async def aclose(self) -> None:
        """Close this event loop's connections, unless they are the caller's."""
        if self._client is None:
            await self._clients.aclose()

    async def __aenter__(self) -> SnapshotClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, steps: api.Steps[_T], conversation_id: str, error: type[SnapshotError]) -> _T:
        client = self._clients.on_loop(explicit=True) if self._client is None else self._client
        try:
            request = next(steps)
            while True:
                response = await client.request(
                    request.method,
                    self._base + request.path,
                    params=request.params,
                    json=request.json,
                    headers=self._headers,
                    timeout=limits(TIMEOUT),
                )
                request = steps.send(api.decode(response, conversation_id, error))
        except StopIteration as done:
            result: _T = done.value
            return result
        except httpx.HTTPError as failure:
            raise error(str(failure) or type(failure).__name__, conversation_id) from failure
        except ValueError as failure:
            raise error(str(failure), conversation_id) from failure
        except SnapshotError as failure:
            if type(failure) is SnapshotError and error is not SnapshotError:
                raise error(failure.message, failure.conversation_id, failure.status_code) from failure
            raise


class SyncSnapshotClient(_Configured):
    """The five calls without an event loop; otherwise as `SnapshotClient`."""

    def __init__(
        self,
        api_base: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        client: httpx.Client | None = None,
    ) -> None:
        super().__init__(api_base, api_key, headers)
        self._owned = client is None
        self._client = httpx.Client() if client is None else client

    def save_snapshot(
        self,
        conversation_id: str,
        turn_number: int | None = None,
        branch_name: str | None = None,
        *,
        tag: str | None = None,
        pin: bool | None = None,
        ttl: int | None = None,
    ) -> SaveSnapshotResponse:
        """Make the newest snapshot of the conversation (or turn) durable now. `ttl` is in seconds."""
        steps = api.save(conversation_id, turn_number, branch_name, tag, pin, ttl)
        return self._run(steps, conversation_id, SaveError)

    def restore_snapshot(
        self, conversation_id: str, turn_number: int | None = None, branch_name: str | None = None
    ) -> RestoreSnapshotResponse:
        """Make a turn (default: the newest) the head of its branch, and bring its state to host memory."""
        return self._run(api.restore(conversation_id, turn_number, branch_name), conversation_id, RestoreError)

    def list_snapshots(
        self, conversation_id: str, branch_name: str | None = None, limit: int | None = None
    ) -> list[SnapshotMetadata]:
        """Newest first, of all branches by default; all of them without a `limit`."""
        return self._run(api.list_all(conversation_id, branch_name, limit), conversation_id, SnapshotError)

    def get_snapshot_info(
        self, conversation_id: str, turn_number: int | None = None, branch_name: str | None = None
    ) -> SnapshotMetadata:
        """The newest snapshot of a branch (default main), or of a turn on it."""
        return self._run(api.info(conversation_id, turn_number, branch_name), conversation_id, SnapshotError)

    def delete_snapshot(
        self, conversation_id: str, turn_number: int | None = None, branch_name: str | None = None
    ) -> DeleteSnapshotResponse:
        """Delete a turn (on main by default), a branch, or the whole conversation, in every tier."""
        return self._run(api.delete(conversation_id, turn_number, branch_name), conversation_id, SnapshotError)

    def close(self) -> None:
        """Close the connections, unless they are the caller's."""
        if self._owned:
            self._client.close()

    def __enter__(self) -> SyncSnapshotClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, steps: api.Steps[_T], conversation_id: str, error: type[SnapshotError]) -> _T:
        try:
            request = next(steps)
            while True:
                response = self._client.request(
                    request.method,
                    self._base + request.path,
                    params=request.params,
                    json=request.json,
                    headers=self._headers,
                    timeout=limits(TIMEOUT),
                )
                request = steps.send(api.decode(response, conversation_id, error))
        except StopIteration as done:
            result: _T = done.value
            return result
        except httpx.HTTPError as failure:
            raise error(str(failure) or type(failure).__name__, conversation_id) from failure
        except ValueError as failure:
            raise error(str(failure), conversation_id) from failure
        except SnapshotError as failure:
            if type(failure) is SnapshotError and error is not SnapshotError:
                raise error(failure.message, failure.conversation_id, failure.status_code) from failure
            raise
