"""Replicas from the cluster: a list and watch of EndpointSlices over plain HTTP, no Kubernetes client needed.

One watcher thread per namespace serves every model in it. Its rules come from failures that others had in production:
list again before every watch and replace the whole set (a deletion missed while the watch was down cannot survive),
bound every watch on the server and the client side, read the projected token for each request, keep the last good set
when the API is away, and tell pods apart by uid, because during rebalancing one pod is in two slices.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from engram_litellm.discovery.endpoints import Endpoint, EndpointSet, NotYet, split_model
from engram_litellm.lines import iterate

logger = logging.getLogger("engram_litellm")

LABEL = "engram.dev/model"
WATCH_SECONDS = 300.0
FIRST_WAIT = 2.0  # how long a call waits for the first list
DENIED_WAIT = 300.0  # before asking again after a refusal: a role may be bound later


def model_label(served_name: str) -> str:
    """The value of the `engram.dev/model` label: served names do not fit into a label, their hash does."""
    return hashlib.sha256(served_name.encode()).hexdigest()[:16]


class SliceSource:
    """`Source` over one watcher per namespace, started by the first call that asks and again after a fork."""

    def __init__(self, api: str, service_account: str, namespace: str | None, watch_seconds: float = WATCH_SECONDS):
        self._api = api
        self._account = Path(service_account)
        self._namespace = namespace
        self._watch_seconds = watch_seconds
        self._lock = threading.Lock()
        self._watchers: dict[tuple[int, str], SliceWatcher] = {}

    def find(self, model: str, *, wait: bool) -> EndpointSet | None:
        """Ready and draining pods of `model`; None without rights, without such a model or before the first list."""
        if not (self._account / "token").is_file():
            return None
        own = self._namespace or _read(self._account / "namespace") or "default"
        namespace, name = split_model(model)
        for place, served in ((own, model), (namespace, name)):
            if place is None:
                continue
            watcher = self._watcher(place)
            if not watcher.synced.is_set():
                if not wait:
                    raise NotYet
                watcher.synced.wait(FIRST_WAIT)
            endpoints = watcher.endpoints(served)
            if endpoints:
                return EndpointSet(served, endpoints, f"EndpointSlices in {place}")
        return None

    def close(self) -> None:
        """Stop the watchers."""
        with self._lock:
            watchers, self._watchers = list(self._watchers.values()), {}
        for watcher in watchers:
            watcher.stop()

    def _watcher(self, namespace: str) -> SliceWatcher:
        with self._lock:
            key = (os.getpid(), namespace)  # a forked child has no thread, so it gets its own watcher
            if key not in self._watchers:
                watcher = SliceWatcher(self._api, namespace, self._account, self._watch_seconds)
                watcher.start()
                self._watchers[key] = watcher
            return self._watchers[key]


class SliceWatcher:
    """Follows the EndpointSlices of one namespace in a daemon thread."""

    def __init__(
        self, api: str, namespace: str, account: Path, watch_seconds: float, on_change: Callable[[], None] | None = None
    ) -> None:
        self._url = f"{api.rstrip('/')}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._namespace = namespace
        self._account = account
        self._watch_seconds = watch_seconds
        self._on_change = on_change or (lambda: None)
        self._slices: dict[str, dict[str, Any]] = {}
        self._by_label: dict[str, tuple[Endpoint, ...]] = {}
        self._stop = threading.Event()
        self.synced = threading.Event()
        self.errors = 0

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name=f"engram-endpoints-{self._namespace}", daemon=True).start()

    def stop(self) -> None:
        """Ask the thread to end; it does at its next event."""
        self._stop.set()

    def endpoints(self, served_name: str) -> tuple[Endpoint, ...]:
        """The last good set of a model, by name."""
        return self._by_label.get(model_label(served_name), ())

    def _run(self) -> None:
        backoff = 0.2
        client: httpx.Client | None = None
        while not self._stop.is_set():
            pause = 0.0
            try:
                client = client or httpx.Client(verify=_trust(self._account), trust_env=False)
                version = self._list(client)
                backoff = 0.2
                self._watch(client, version)
            except httpx.HTTPStatusError as error:
                self.errors += 1
                pause = backoff
                if error.response.status_code == 403 or not self.synced.is_set():
                    logger.info("no right to watch EndpointSlices in %s; using DNS", self._namespace)
                    self._replace({})
                    self.synced.set()
                    pause = DENIED_WAIT
            except Exception as error:  # the API being away, or answering nonsense, never drops the last good set
                self.errors += 1
                logger.debug("EndpointSlice watch in %s: %s", self._namespace, error)
                pause = backoff
            if pause:
                self._stop.wait(pause * random.uniform(0.5, 1.5))
                backoff = min(backoff * 2, 30.0)
        if client is not None:
            client.close()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {_read(self._account / 'token')}"}  # projected tokens rotate

    def _list(self, client: httpx.Client) -> str:
        slices: dict[str, dict[str, Any]] = {}
        page: str | None = None
        while True:
            params = {"labelSelector": LABEL, "limit": "500"} | ({"continue": page} if page else {})
            response = client.get(self._url, params=params, headers=self._headers(), timeout=10.0)
            response.raise_for_status()
            body = response.json()
            slices.update({item["metadata"]["name"]: item for item in body["items"]})
            page = body["metadata"].get("continue")
            if not page:
                break
        self._replace(slices)
        self.synced.set()
        return str(body["metadata"]["resourceVersion"])

    def _watch(self, client: httpx.Client, version: str) -> None:
        """One bounded watch; returns when it ends or when the server says that the version is gone (410)."""
        seconds = max(1, int(self._watch_seconds * random.uniform(0.8, 1.2)))
        params = {
            "labelSelector": LABEL,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        timeout = httpx.Timeout(10.0, read=seconds + 15.0)
        with client.stream("GET", self._url, params=params, headers=self._headers(), timeout=timeout) as response:
            response.raise_for_status()
            for line in iterate(response.iter_bytes()):
                if self._stop.is_set():
                    return
                if not line:
                    continue
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                if event["type"] == "BOOKMARK":
                    continue
                item = event["object"]
                slices = dict(self._slices)
                if event["type"] == "DELETED":
                    slices.pop(item["metadata"]["name"], None)
                else:
                    slices[item["metadata"]["name"]] = item
                self._replace(slices)

    def _replace(self, slices: dict[str, dict[str, Any]]) -> None:
        self._slices = slices
        self._by_label = endpoints_by_label(slices.values())
        self._on_change()


def endpoints_by_label(slices: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Endpoint, ...]]:
    """Pure: the usable endpoints of every model. Terminating pods are kept as draining, others must be ready."""
    pods: dict[str, dict[str, Endpoint]] = {}
    for item in slices:
        label = (item["metadata"].get("labels") or {}).get(LABEL)
        port = _http_port(item)
        if label is None or port is None:
            continue
        for entry in item.get("endpoints") or ():
            conditions = entry.get("conditions") or {}
            draining = bool(conditions.get("terminating"))
            if not entry.get("addresses") or not (draining or conditions.get("ready") is not False):
                continue
            address = entry["addresses"][0]
            target = entry.get("targetRef") or {}
            key = target.get("uid") or address
            known = pods.setdefault(label, {}).get(key)
            host = f"[{address}]" if ":" in address else address
            pods[label][key] = Endpoint(
                target.get("name") or entry.get("hostname") or address,
                f"http://{host}:{port}",
                draining or (known is not None and known.draining),
            )
    return {
        label: tuple(sorted(entries.values(), key=lambda endpoint: (endpoint.name, endpoint.url)))
        for label, entries in pods.items()
    }


def _http_port(item: Mapping[str, Any]) -> int | None:
    """The port named `http`; never the admin port."""
    ports: list[Mapping[str, Any]] = list(item.get("ports") or ())
    for port in ports:
        if port.get("name") == "http":
            return int(port["port"])
    return int(ports[0]["port"]) if len(ports) == 1 and ports[0].get("name") in (None, "") else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _trust(account: Path) -> ssl.SSLContext:
    """The cluster's own certificate authority, or the system's when none is mounted."""
    authority = account / "ca.crt"
    return ssl.create_default_context(cafile=str(authority) if authority.is_file() else None)
