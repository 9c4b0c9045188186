"""The chain of sources, first answer wins, and the memory that keeps a call going when every source is silent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from engram_litellm.discovery.dns import DnsSource
from engram_litellm.discovery.endpoints import EndpointSet, NotYet, Source, explicit_set
from engram_litellm.discovery.local import LocalFile
from engram_litellm.discovery.slices import SliceSource
from engram_litellm.errors import NoEndpoint
from engram_litellm.settings import Settings

logger = logging.getLogger("engram_litellm")


class Discovery:
    """Finds the replicas of a model. Nothing is started before the first call."""

    def __init__(self, settings: Settings, sources: Sequence[Source] | None = None) -> None:
        self._settings = settings
        self._sources = default_sources(settings) if sources is None else tuple(sources)
        self._lock = threading.Lock()
        self._last_good: dict[str, EndpointSet] = {}

    def find(self, model: str, api_base: str | None = None, *, wait: bool = True) -> EndpointSet:
        """The replicas of `model`; `api_base` and ENGRAM_* addresses win over everything that is discovered.

        NoEndpoint when no source ever knew one, NotYet when `wait` is false and the answer would block, ValueError
        for an address that is not a URL.
        """
        if api_base:
            return explicit_set(model, [api_base], "api_base")
        if self._settings.api_base:
            return explicit_set(model, [self._settings.api_base], "ENGRAM_API_BASE")
        if self._settings.endpoints:
            return explicit_set(model, self._settings.endpoints, "ENGRAM_ENDPOINTS")
        for source in self._sources:
            try:
                found = source.find(model, wait=wait)
            except NotYet:
                raise
            except Exception as error:  # a source that fails is a source that knows nothing
                logger.warning("discovery by %s failed: %s", type(source).__name__, error)
                continue
            if found is not None:
                with self._lock:
                    self._last_good[model] = found
                return found
        with self._lock:
            known = self._last_good.get(model)
        if known is not None:
            return known
        raise NoEndpoint(
            f"no endpoint of model {model!r} is known: set api_base or ENGRAM_API_BASE, start it with `engram up`, or "
            f"run in its cluster (looked at {self._settings.endpoints_file}"
            + (", EndpointSlices and DNS)" if self._settings.kubernetes_api else ")")
        )

    def close(self) -> None:
        """Stop what runs in the background."""
        for source in self._sources:
            source.close()


def default_sources(settings: Settings) -> tuple[Source, ...]:
    """The chain of the settings: the local mode's file, then in a cluster EndpointSlices and DNS."""
    if settings.discovery == "off":
        return ()
    sources: list[Source] = [LocalFile(settings.endpoints_file)]
    if settings.kubernetes_api:
        pods = settings.discovery != "service"  # a mesh wants Service addresses, not pods'
        if pods:
            sources.append(SliceSource(settings.kubernetes_api, settings.service_account, settings.namespace))
        namespace = settings.namespace or _own_namespace(settings.service_account)
        sources.append(DnsSource(namespace, settings.service, settings.cluster_domain, pods=pods))
    return tuple(sources)


def _own_namespace(service_account: str) -> str:
    try:
        return (Path(service_account) / "namespace").read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"
