"""Stands in for the engine in tests of the local mode: same flags and health calls, no model, fails when told to.

`--drain-seconds` is the time that a SIGTERM takes (`never` ignores it), `--crash-file` makes it exit at start while
that file exists, `--child-pid-file` makes it start a sleeping child. `POST /set?ready=0` (or live, startup) changes an
answer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit


class Handler(BaseHTTPRequestHandler):
    answers = {"startup": True, "ready": True, "live": True}  # noqa: RUF012  one server per process

    def do_GET(self) -> None:
        if self.path == "/about":
            self._reply(200, {"argv": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid(), "cwd": os.getcwd()})
            return
        good = self.answers.get(self.path.removeprefix("/health/"))
        self._reply(404 if good is None else 200 if good else 503, {})

    def do_POST(self) -> None:
        for name, value in parse_qsl(urlsplit(self.path).query):
            self.answers[name] = value == "1"
        self._reply(200, {})

    def _reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--drain-seconds", default="0")
    parser.add_argument("--crash-file", type=Path)
    parser.add_argument("--child-pid-file", type=Path)
    options, _ = parser.parse_known_args()
    if options.crash_file and options.crash_file.exists():
        sys.exit("the stand-in was told to crash")  # exit code 1
    if options.child_pid_file:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        options.child_pid_file.write_text(str(child.pid))
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    drain = options.drain_seconds

    def stop(*_: object) -> None:
        if drain == "never":
            return
        Handler.answers["ready"] = False
        time.sleep(float(drain))
        print("drained", flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=stop).start())
    print("serving", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
