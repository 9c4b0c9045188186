"""The part of a Kubernetes API server that discovery talks to: list and watch of EndpointSlices, with its failures.

A watch can be dropped, a deletion can happen while nobody watches, an old resource version is gone (410), rights can be
missing, tokens can change. Plain threads and sockets: it must keep many watches open and break them at will.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


class FakeSlices:
    """One namespace, `ns`."""

    def __init__(self) -> None:
        self.token = "token-1"
        self.status = 0  # answer everything with this
        self.requests: list[dict[str, str]] = []
        self.lists = 0
        self.watches = 0
        self._version = 100
        self._oldest = 0
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._dropped = 0
        self._changed = threading.Condition()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake._get(self)

            def log_message(self, *_: Any) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                return  # clients that go away are part of the tests

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeSlices:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_watches()
        self._server.shutdown()
        self._server.server_close()

    def set(self, name: str, label: str, *endpoints: dict[str, Any], port: int = 8000) -> None:
        """Add or change a slice."""
        with self._changed:
            self._version += 1
            kind = "MODIFIED" if name in self._slices else "ADDED"
            self._slices[name] = {
                "metadata": {
                    "name": name,
                    "labels": {"engram.dev/model": label},
                    "resourceVersion": str(self._version),
                },
                "ports": [{"name": "admin", "port": 8001}, {"name": "http", "port": port}],
                "endpoints": list(endpoints),
            }
            self._events.append((self._version, kind, self._slices[name]))
            self._changed.notify_all()

    def delete(self, name: str) -> None:
        with self._changed:
            self._version += 1
            self._events.append((self._version, "DELETED", self._slices.pop(name)))
            self._changed.notify_all()

    def delete_unseen(self, name: str) -> None:
        """Drop every watch, delete, and forget the history: the deletion is never sent, old versions answer 410."""
        with self._changed:
            self._dropped += 1
            self._slices.pop(name)
            self._version += 2
            self._oldest = self._version
            self._events.clear()
            self._changed.notify_all()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Lists are not answered before this ends."""
        with self._changed:
            yield

    def drop_watches(self) -> None:
        with self._changed:
            self._dropped += 1
            self._changed.notify_all()

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        query = dict(parse_qsl(url.query))
        self.requests.append({**query, "authorization": handler.headers.get("authorization", "")})
        status = self.status or (401 if handler.headers.get("authorization") != f"Bearer {self.token}" else 0)
        if not url.path.endswith("/namespaces/ns/endpointslices"):
            status = status or 403
        if status:
            self._send(handler, status, {"kind": "Status", "code": status})
        elif query.get("watch") == "1":
            self._watch(handler, int(query["resourceVersion"]), float(query["timeoutSeconds"]))
        else:
            self.lists += 1
            with self._changed:
                body = {"items": list(self._slices.values()), "metadata": {"resourceVersion": str(self._version)}}
            self._send(handler, 200, body)

    def _watch(self, handler: BaseHTTPRequestHandler, version: int, seconds: float) -> None:
        handler.send_response(200)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        for event in self._follow(version, time.monotonic() + seconds):
            data = json.dumps(event).encode() + b"\n"
            handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")

    def _follow(self, version: int, end: float) -> Iterator[dict[str, Any]]:
        if version < self._oldest:
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
            return
        with self._changed:
            dropped = self._dropped
            self.watches += 1
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
        while time.monotonic() < end:
            with self._changed:
                if self._dropped != dropped:
                    return
                events = [event for event in self._events if event[0] > version]
                if not events:
                    self._changed.wait(min(0.5, max(0.0, end - time.monotonic())))
            for changed, kind, item in events:
                version = changed
                yield {"type": kind, "object": item}

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
