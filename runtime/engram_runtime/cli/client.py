"""A small HTTP client for the commands that talk to a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Self

import httpx

from engram_runtime.cli.lazy import CommandError
from engram_runtime.settings import Settings

DEFAULT_URL = "http://127.0.0.1:8000"


class Client:
    """Speaks to one server; CommandError with the server's own message for anything that fails."""

    def __init__(self, base_url: str | None, api_key: str | None, settings: Settings) -> None:
        url = (base_url or settings.base_url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
        key = api_key or settings.api_key
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            # A long prefill sends nothing for a while; connecting is quick or does not happen.
            timeout=httpx.Timeout(600.0, connect=5.0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """The JSON answer of one call."""
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise CommandError(f"{self.url} does not answer: {error}") from error
        return _checked(response)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream."""
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code >= 400:
                    response.read()
                    _checked(response)
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    data = json.loads(line[6:])
                    if "error" in data:
                        raise CommandError(str(data["error"]["message"]))
                    yield data
        except httpx.HTTPError as error:
            raise CommandError(f"{self.url} broke off: {error}") from error


def _checked(response: httpx.Response) -> Any:
    try:
        data = response.json()
    except ValueError:
        data = None
    if response.status_code >= 400:
        message = data["error"]["message"] if isinstance(data, dict) and "error" in data else response.text[:200]
        raise CommandError(f"{response.status_code}: {message}")
    return data
