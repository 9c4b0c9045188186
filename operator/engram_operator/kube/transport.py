"""Requests to a real API server through the Kubernetes client library: its configuration, TLS, proxies, credentials.

The library knows in-cluster accounts and kubeconfigs with all their ways to log in, and reads a rotated token again.
Its typed API is not used: it would add defaults to what we apply, and refuse objects of newer servers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config

from engram_operator.kube.client import JSON, Object, Response
from engram_operator.kube.errors import Unavailable

REQUEST_S = 15.0  # a page of 500 objects takes well under a second
CONNECT_S = 5.0
MAX_RETRY_AFTER_S = 30.0
FIRST_REFUSED_S = 0.1
LAST_REFUSED_S = 30.0

log = logging.getLogger(__name__)

Configuration = Any  # kubernetes.aio.client.Configuration: the library has no types that mypy takes
Load = Callable[[], Awaitable[Configuration]]


async def load_configuration() -> Configuration:
    """The pod's service account, or the current context of $KUBECONFIG or ~/.kube/config.

    kubernetes' ConfigException when there is neither.
    """
    loaded = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=loaded)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        await config.load_kube_config(client_configuration=loaded, persist_config=False)  # type: ignore[no-untyped-call]
    return loaded


@dataclass(slots=True)
class ApiTransport:
    """One connection pool. After 401 the credentials are read anew, and the request is sent once more."""

    load: Load = load_configuration
    user_agent: str = "engram-operator"
    timeout_s: float = REQUEST_S
    _api: Any = None
    _retired: Any = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        accept: str = JSON,
    ) -> Response:
        api = await self._connected(None)
        response = await self._send(api, method, path, query, body, content_type, accept)
        if response.status == 401:
            api = await self._connected(api.configuration)
            response = await self._send(api, method, path, query, body, content_type, accept)
        return response

    async def watch_session(self, listed: Callable[[str], None]) -> tuple[str, aiohttp.ClientSession]:
        """The server's address, and a session for long requests that is never answered 401. `listed` is told the path
        of each list that has been answered, since only then a watch begins anew.

        Its requests carry the credentials of the moment; refused ones are read anew and asked again, for as long as it
        takes. kopf itself would close its session under all other watches on the first 401.
        """
        api = await self._connected(None)

        async def authorize(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            delay = FIRST_REFUSED_S
            api = await self._connected(None)
            while True:
                headers: dict[str, str] = {}
                await api.update_params_for_auth(headers, [], ["BearerToken"], "", "GET", None)
                for name, value in headers.items():
                    request.headers[name] = value
                response = await handler(request)
                if response.status == 200 and request.method == "GET" and "watch" not in request.url.query:
                    listed(request.url.path)
                if response.status != 401:
                    return response
                response.release()
                log.warning("credentials were refused: reading them again", extra={"wait_s": delay})
                api = await self._connected(api.configuration)
                await asyncio.sleep(delay)
                delay = min(delay * 2, LAST_REFUSED_S)

        # No limit: every watch is a connection that stays.
        connector = aiohttp.TCPConnector(limit=0, ssl=api.rest_client.ssl_context)
        agent = {"User-Agent": self.user_agent}
        session = aiohttp.ClientSession(connector=connector, headers=agent, trust_env=True, middlewares=(authorize,))
        return api.configuration.host, session

    async def close(self) -> None:
        for api in (self._api, self._retired):
            if api is not None:
                await api.close()
        self._api = self._retired = None

    async def _connected(self, refused: Configuration | None) -> Any:
        """The client; with new credentials when `refused` are still the current ones."""
        async with self._lock:
            if self._api is not None and self._api.configuration is not refused:
                return self._api
            try:
                loaded = await self.load()
            except (OSError, config.ConfigException) as error:
                raise Unavailable(0, "Configuration", f"no way to reach an API server: {error}") from error
            if self._api is not None and _tls(loaded) == _tls(self._api.configuration):
                self._api.configuration = loaded
                return self._api
            # Requests under way still use the old pool; those of the one before it have ended long ago.
            retired, self._retired = self._retired, self._api
            if retired is not None:
                await retired.close()
            self._api = client.ApiClient(loaded)
            return self._api

    async def _send(
        self,
        api: Any,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        accept: str,
    ) -> Response:
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": self.user_agent}
        url = f"{api.configuration.host}{path}{'?' + urlencode(query) if query else ''}"
        timeout = aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=CONNECT_S)
        try:
            await api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            answer = await api.call_api(method, url, header_params=headers, body=body, _request_timeout=timeout)
            raw = await answer.read()
        except TimeoutError as error:
            raise Unavailable(0, "Timeout", f"the API server did not answer within {self.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(0, "Connection", f"the API server cannot be reached: {error}") from error
        try:
            payload = json.loads(raw) if raw else {}
        except ValueError:  # a proxy's page, or plain text
            payload = {"message": raw[:200].decode(errors="replace")}
        if not isinstance(payload, dict):
            payload = {"message": str(payload)[:200]}
        return Response(answer.status, payload, _retry_after(answer.headers.get("Retry-After")))


def _tls(configuration: Configuration) -> tuple[Any, ...]:
    """What a connection pool is made of: while it is equal, the pool can stay."""
    return (
        configuration.host,
        configuration.ssl_ca_cert,
        configuration.verify_ssl,
        configuration.cert_file,
        configuration.key_file,
        configuration.proxy,
    )


def _retry_after(value: str | None) -> float | None:
    """Seconds, bounded; a date, which the API server never sends, is taken as absent."""
    try:
        return min(max(0.0, float(value)), MAX_RETRY_AFTER_S) if value else None
    except ValueError:
        return None
