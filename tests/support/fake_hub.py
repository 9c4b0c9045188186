"""A model hub on loopback, with what hubs do: redirects to another host, gates, tokens, and every way to fail.

Large files are redirected to a second server, as the real one does it; that one must never see a token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
OTHER = "d" * 40
CHECKPOINT: dict[str, bytes] = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer_config.json": b"{}",
    "tokenizer.json": b"x" * 3000,
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# hello",
    "pytorch_model.bin": b"\x80pickle",
    "original/consolidated.safetensors": b"other layout",
    "model.safetensors": bytes(range(256)) * 1024,  # 256 KiB
}


@dataclass
class FakeHub:
    """Faults are attributes, set at any time. `statuses` are answered first, one a request for a file; `truncate` and
    `corrupt` count answers that are cut short or wrong; `chunk_seconds` slows bodies down; no body goes beyond byte
    `hold_from` of its file before `released` is set."""

    url: str = ""
    cdn_url: str = ""
    revisions: dict[str, dict[str, bytes]] = field(default_factory=lambda: {COMMIT: dict(CHECKPOINT)})
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str | None = None
    gated: bool = False
    wrong_digest: bool = False
    digests: bool = True
    ranges: bool = True
    statuses: list[int] = field(default_factory=list)
    truncate: int = 0
    corrupt: int = 0
    chunk_seconds: float = 0.0
    hold_from: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str, str]] = field(default_factory=list)  # server, path, range, authorization
    lock: threading.Lock = field(default_factory=threading.Lock)

    def file_requests(self, name: str = "") -> list[tuple[str, str, str, str]]:
        return [request for request in self.requests if request[0] == "cdn" and request[1].endswith(name)]

    def listing(self, commit: str) -> dict[str, Any]:
        siblings = []
        for path, data in self.revisions[commit].items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(data)}
            if self.digests and path.endswith(".safetensors"):
                sha = hashlib.sha256(data + (b"!" if self.wrong_digest else b"")).hexdigest()
                entry["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 134}
            elif self.digests:
                entry["blobId"] = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            siblings.append(entry)
        return {"id": "org/model", "sha": commit, "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    server_name = "hub"

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        who = self.headers.get("authorization", "")
        with hub.lock:
            hub.requests.append((self.server_name, path, self.headers.get("range", ""), who))
        if self.server_name == "cdn":
            commit, _, name = path.strip("/").partition("/")
            self._file(hub.revisions[commit][name])
        elif hub.token is not None and who != f"Bearer {hub.token}":
            self._error(401, "RepoNotFound")
        elif hub.gated:
            self._error(403, "GatedRepo")
        elif match := re.fullmatch(r"/api/models/org/model(?:/revision/(.+))?", path):
            wanted = match[1] or "main"
            commit = hub.branches.get(wanted, wanted)
            if commit not in hub.revisions:
                self._error(404, "RevisionNotFound")
            else:
                self._send(200, json.dumps(hub.listing(commit)).encode())
        elif match := re.fullmatch(r"/org/model/resolve/([0-9a-f]{40})/(.+)", path):
            if match[1] not in hub.revisions or match[2] not in hub.revisions[match[1]]:
                self._error(404, "EntryNotFound")
            else:
                self._send(302, b"", {"location": f"{hub.cdn_url}/{match[1]}/{match[2]}?signature=secret"})
        else:
            self._error(404, "RepoNotFound")

    def _file(self, data: bytes) -> None:
        hub = self.hub
        with hub.lock:
            status = hub.statuses.pop(0) if hub.statuses else None
        if status is not None:
            self._error(status, "")
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        headers = {}
        status, first = 200, 0
        if match is not None and hub.ranges:
            first, last = int(match[1]), min(int(match[2]), len(data) - 1)
            headers["content-range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        with hub.lock:
            cut = hub.truncate > 0 and len(data) > 1000
            wrong = hub.corrupt > 0 and len(data) > 1000
            hub.truncate -= cut
            hub.corrupt -= wrong
        if wrong:
            data = b"?" + data[1:]
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        body = data[: len(data) // 2] if cut else data
        for start in range(0, len(body), 8192):
            if hub.hold_from is not None and first + start >= hub.hold_from:
                self.wfile.flush()
                hub.released.wait(240)
            self.wfile.write(body[start : start + 8192])
            if hub.chunk_seconds:
                self.wfile.flush()
                time.sleep(hub.chunk_seconds)
        if cut:
            self.close_connection = True

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"x-error-code": code})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:  # a client that was killed
        return None


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    servers = []
    for name in ("hub", "cdn"):
        handler = type("Handler", (_Handler,), {"hub": hub, "server_name": name})
        server = _Server(("127.0.0.1" if name == "hub" else "127.0.0.2", 0), handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        servers.append(server)
    hub.url, hub.cdn_url = (f"http://{s.server_address[0]}:{s.server_address[1]}" for s in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
