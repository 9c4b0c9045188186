"""What discovery yields: the replicas of one served model, by stable name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica. `name` is stable over restarts (a pod's name), `url` has no path. Draining takes no new turns."""

    name: str
    url: str
    draining: bool = False


@dataclass(frozen=True, slots=True)
class EndpointSet:
    """The replicas of a model. `model` is the served name to send, `explicit` that a person gave the address."""

    model: str
    endpoints: tuple[Endpoint, ...]
    source: str
    explicit: bool = False


class Source(Protocol):
    """One link of the chain."""

    def find(self, model: str, *, wait: bool) -> EndpointSet | None:
        """The replicas of `model` ("NAME" or "NAMESPACE/NAME"), or None when this source knows none.

        Raises `NotYet` instead of blocking when `wait` is false and the answer needs input or output first.
        """
        ...

    def close(self) -> None:
        """Stop what runs in the background, if anything does."""
        ...


class NotYet(Exception):
    """The answer needs a blocking call, and the caller must not block (it runs on an event loop)."""


def base_url(url: str) -> str:
    """An address as people write it (with or without /v1, a trailing slash or the whole path) without its path."""
    url = url.strip().rstrip("/")
    for tail in ("/chat/completions", "/v1"):
        url = url.removesuffix(tail).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"api_base must be an http or https URL, got {url!r}")
    return url


def explicit_set(model: str, addresses: Sequence[str], source: str) -> EndpointSet:
    """Addresses that a person gave, "url" or "name=url"; a replica without a name is named by its host and port."""
    endpoints = []
    for address in addresses:
        name, separator, url = address.partition("=")
        if not separator or "/" in name:  # a URL may hold "=" in its query
            name, url = "", address
        url = base_url(url)
        endpoints.append(Endpoint(name or urlsplit(url).netloc, url))
    return EndpointSet(model, tuple(endpoints), source, explicit=True)


def split_model(model: str) -> tuple[str | None, str]:
    """ "NAMESPACE/NAME" as (namespace, name). Served names may hold slashes themselves: try the whole name first."""
    namespace, separator, name = model.partition("/")
    return (namespace, name) if separator and name else (None, model)
