"""A reverse proxy between an S3 client and its server that makes requests fail in every way that networks know.

Signatures stay valid: the Host header and the path are passed on as they came. Faults are chosen by method, path and
query, for a number of requests or until they are cleared; everything that passed is counted.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote, urlsplit

Action = Literal["answer", "silence", "drip", "truncate", "flip", "drop", "lose_answer", "stall"]
DRIP_SECONDS = 0.05
HOP_HEADERS = {"connection", "transfer-encoding", "keep-alive"}


@dataclass
class Fault:
    """`answer`: status, code and headers instead of the server's. `silence`: never answer. `drip`: a byte at a time.
    `truncate`: close in the middle of the body. `flip`: one wrong bit in it. `drop`: close without doing anything.
    `lose_answer`: let the server do it, then close. `stall`: do not read the request's body. With `hold` nothing of it
    happens before that is set."""

    action: Action
    status: int = 500
    code: str = "InternalError"
    headers: dict[str, str] = field(default_factory=dict)
    method: str = ""  # any
    path: str = ""  # contained in the unquoted path and query
    times: int | None = None  # None: until cleared
    skip: int = 0  # let so many matching requests pass first
    hold: threading.Event | None = None


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    headers: dict[str, str]


class FaultProxy:
    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(upstream)
        self.upstream = (parts.hostname or "", parts.port or 80)
        self.seen: list[Seen] = []
        self.injected = 0
        self.strip: frozenset[str] = frozenset()  # request headers (lower case) that the server never sees
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def inject(self, action: Action, **settings: object) -> Fault:
        fault = Fault(action, **settings)  # type: ignore[arg-type]
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()
            self.seen.clear()
            self.injected = 0

    def choose(self, method: str, path: str, headers: dict[str, str]) -> Fault | None:
        plain = unquote(path)
        with self._lock:
            self.seen.append(Seen(method, plain, headers))
            for fault in self._faults:
                if fault.method not in ("", method) or fault.path not in plain:
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    if not fault.times:
                        continue
                    fault.times -= 1
                self.injected += 1
                return fault
        return None

    def wait_until_stopped(self, seconds: float) -> bool:
        return self._stopped.wait(seconds)

    def count(self, method: str, path: str = "") -> int:
        with self._lock:
            return sum(1 for seen in self.seen if seen.method == method and path in seen.path)


class _Handler(BaseHTTPRequestHandler):
    owner: FaultProxy
    protocol_version = "HTTP/1.1"
    timeout = 60

    def _handle(self) -> None:
        if self.path.startswith("http://"):  # asked as a forward proxy: the host is in the Host header too
            self.path = "/" + self.path.removeprefix("http://").partition("/")[2]
        fault = self.owner.choose(self.command, self.path, dict(self.headers.items()))
        if fault is not None and fault.hold is not None:
            fault.hold.wait(240)
        if fault is not None and fault.action == "stall":
            self._hang()
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        actions: dict[str, Callable[[], None]] = {
            "answer": lambda: self._answer(fault or Fault("answer")),
            "silence": self._hang,
            "drop": self._close,
        }
        if fault is not None and fault.action in actions:
            actions[fault.action]()
            return
        status, headers, data = self._forward(body)
        if fault is not None and fault.action == "lose_answer":
            self._close()
            return
        self._reply(status, headers, data, fault.action if fault is not None else "")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(*self.owner.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP_HEADERS | {"expect"} | self.owner.strip:
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _reply(self, status: int, headers: list[tuple[str, str]], data: bytes, action: str) -> None:
        self.send_response_only(status)
        sized = False
        for name, value in headers:
            if name.lower() in HOP_HEADERS:
                continue
            sized = sized or name.lower() == "content-length"
            self.send_header(name, value)
        if not sized and status not in (204, 304):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if action == "drip":
            self._drip(data)
        elif action == "truncate":
            self.wfile.write(data[: len(data) // 2])
            self._close()
        elif action == "flip" and data:
            middle = len(data) // 2
            self.wfile.write(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        else:
            self.wfile.write(data)

    def _answer(self, fault: Fault) -> None:
        data = b""
        if self.command != "HEAD":
            data = (
                '<?xml version="1.0" encoding="UTF-8"?>'
                f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>"
            ).encode()
        self.send_response_only(fault.status)
        for name, value in fault.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _drip(self, data: bytes) -> None:
        for at in range(len(data)):
            self.wfile.write(data[at : at + 1])
            self.wfile.flush()
            if self.owner.wait_until_stopped(DRIP_SECONDS):
                break
        self.close_connection = True

    def _hang(self) -> None:
        """Until the client gives up."""
        self.connection.settimeout(0.1)
        until = time.monotonic() + 60
        while time.monotonic() < until and not self.owner.wait_until_stopped(0.05):
            try:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    break
                time.sleep(0.05)
            except TimeoutError:
                continue
            except OSError:
                break
        self._close()

    def _close(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def handle(self) -> None:
        with suppress(OSError):  # clients that hang up are what this is about
            super().handle()

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


@contextmanager
def faulty(upstream: str, tls: ssl.SSLContext | None = None) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream, tls)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
