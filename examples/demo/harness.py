"""What the demo needs around the application: `engram up` as a child, the application as a child, the admin's view.

Every run gets a folder of its own with its own XDG state directory, so no run can restore what another one stored.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import httpx

HERE = Path(__file__).parent
SERVED_NAME = "smollm"

MODEL_YAML = """\
apiVersion: engram.dev/v1alpha1
kind: EngramModel
metadata: {{name: {name}}}
spec:
  model: {{uri: "file://{model}"}}
  accelerator: {{resourceName: ""}}
  engine: {{dtype: float32, maxModelLen: 4096, args: {args}}}
---
apiVersion: engram.dev/v1alpha1
kind: SnapshotPolicy
metadata: {{name: default}}
spec:
  storage: {{uri: "file://{store}"}}
"""


class DemoError(RuntimeError):
    """The demo cannot go on; the message says which step and where its log lies."""


class Deployment:
    """One `engram up` with a state folder of its own. Use as a context manager."""

    def __init__(self, folder: Path, model: Path, *, extra_args: list[str] | None, port_base: int) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.state_home = folder / "state"
        self.log_path = folder / "engram-up.log"
        self.port_base = port_base
        self.url = f"http://127.0.0.1:{port_base}"
        self.environment = {**os.environ, "XDG_STATE_HOME": str(self.state_home)}
        for path in (self.store, self.state_home):
            path.mkdir(parents=True)
        self._yaml = folder / "engram.yaml"
        self._yaml.write_text(
            MODEL_YAML.format(name=SERVED_NAME, model=model, store=self.store, args=json.dumps(extra_args or []))
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Deployment:
        self._log = self.log_path.open("ab")
        command = [sys.executable, "-m", "engram_runtime.cli", "up", "-f", str(self._yaml)]
        command += ["--port-base", str(self.port_base)]
        self._process = subprocess.Popen(
            command, env=self.environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._log is not None:
            self._log.close()

    def wait_ready(self, timeout: float = 180.0) -> None:
        """Block until the endpoint is published and ready; raises DemoError with the log's tail."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                if self._published() and httpx.get(f"{self.url}/health/ready", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-25:])
        raise DemoError(f"the engine did not become ready; {self.log_path} ends with:\n{tail}")

    def _published(self) -> bool:
        try:
            document = json.loads((self.state_home / "engram" / "endpoints.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(document.get("models", {}).get(SERVED_NAME, {}).get("endpoints"))

    def engine_pids(self) -> list[int]:
        """The `engram serve` processes below this deployment's `engram up`."""
        assert self._process is not None
        listing = subprocess.run(["ps", "-axo", "pid=,ppid=,command="], check=True, stdout=subprocess.PIPE, text=True)
        rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
        below, grown = {self._process.pid}, True
        while grown:
            children = {int(pid) for pid, parent, _ in rows if int(parent) in below} - below
            grown = bool(children)
            below |= children
        return [int(pid) for pid, _, command in rows if int(pid) in below and " serve " in f"{command} "]

    def kill_engine(self) -> list[int]:
        """SIGKILL the engine, and wait until `engram up` has brought another one up."""
        pids = self.engine_pids()
        if not pids:
            raise DemoError("no engine process found to kill")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while set(self.engine_pids()) & set(pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        return pids

    def wait_settled(self, conversation_id: str, turn: int, timeout: float = 30.0) -> dict[str, Any]:
        """Block until the turn's newest boundary is in the store, as it is once the user takes a breath."""
        deadline = time.monotonic() + timeout
        newest: dict[str, Any] = {}
        while time.monotonic() < deadline:
            answer = httpx.get(
                f"{self.url}/v1/snapshots", params={"conversation_id": conversation_id, "limit": 20}, timeout=10
            )
            for item in answer.raise_for_status().json()["data"]:
                if item["turn_number"] != turn or "store" not in item.get("tiers", []):
                    continue
                newest = item
                if item["boundary"] == "next_history":
                    return newest
            time.sleep(0.05)
        if newest:
            return newest
        raise DemoError(f"turn {turn} of {conversation_id} did not reach the store within {timeout:.0f} s")

    def stored_files(self) -> Iterator[Path]:
        """Every file of the durable store and of the disk tiers."""
        for folder in (self.store, self.state_home):
            yield from (path for path in folder.rglob("*") if path.is_file())


class Application:
    """The chat application as a child process: one question in, one turn out."""

    def __init__(self, deployment: Deployment, max_tokens: int) -> None:
        self.log_path = deployment.folder / "chat.log"
        self._log = self.log_path.open("ab")
        command = [sys.executable, str(HERE / "chat.py"), "--model", f"engram/{SERVED_NAME}", "--json"]
        self._process = subprocess.Popen(
            [*command, "--max-tokens", str(max_tokens)],
            env=deployment.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(f"the application stopped; {self.log_path} ends with:\n{tail}")
        turn: dict[str, Any] = json.loads(line)
        return turn

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


def zero_states(files: Iterator[Path]) -> int:
    """Overwrite every stored KV and recurrent state tensor with zeros, in place; returns the bytes zeroed.

    Reads the safetensors header itself (8-byte length, then JSON) so that the product's own reader is not what decides
    which bytes were changed.
    """
    zeroed = 0
    for path in files:
        with path.open("r+b") as file:
            raw = file.read(8)
            if len(raw) < 8:
                continue
            (length,) = struct.unpack("<Q", raw)
            if not 2 <= length <= 100_000:
                continue
            try:
                header = json.loads(file.read(length))
            except ValueError:
                continue
            for name, entry in header.items() if isinstance(header, dict) else []:
                if not (name.startswith("kv.") or name in ("ssm", "conv")) or "data_offsets" not in entry:
                    continue
                start, end = entry["data_offsets"]
                file.seek(8 + length + start)
                file.write(bytes(end - start))
                zeroed += end - start
            file.flush()
            os.fsync(file.fileno())
    return zeroed
