"""One pod's life on this machine: folders, init containers in order, the engine, restarts with a growing pause."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from engram_operator.errors import ResourceError
from engram_operator.local.events import Event, EventSink, Phase
from engram_operator.local.plan import LocalContainer, LocalPod
from engram_operator.local.probes import ProbeFailed, watch
from engram_operator.local.process import ContainerProcess, describe_exit

BACKOFF_FIRST_SECONDS = 1.0
BACKOFF_LAST_SECONDS = 10.0
STEADY_SECONDS = 10.0  # a container that was ready for this long is not in a crash loop


class PodRunner:
    """Runs a planned pod until told to stop. `on_ready(pod, ready)` follows its readiness."""

    def __init__(self, pod: LocalPod, emit: EventSink, on_ready: Callable[[LocalPod, bool], None]) -> None:
        self.pod = pod
        self._emit_event = emit
        self._on_ready = on_ready
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._lock: int | None = None
        self._backoff = 0.0
        self._ready = False
        self._ready_since: float | None = None

    def stop(self) -> None:
        """Ask for the orderly end: SIGTERM and the grace time."""
        self._stop.set()

    def hurry(self) -> None:
        """End the grace time now."""
        self._hurry.set()

    def acquire(self) -> None:
        """Take the pod's folder and prepare it. ResourceError when another process still uses it."""
        folder = self.pod.folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            pids = sorted(path.read_text() for path in folder.glob("*.pid"))
            left = f" (pid {', '.join(pids)})" if pids else ""
            raise ResourceError(
                [f"pod {self.pod.key} is still running{left}: stop the engram up it belongs to, or that process"]
            ) from None
        self._lock = lock
        for path in self.pod.clear:
            shutil.rmtree(path, ignore_errors=True)
        for path in (*self.pod.clear, *self.pod.keep):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path, content in self.pod.files.items():
            _write_private(path, content)

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def run(self) -> None:
        """Until stop(). Failures of containers are events, never exceptions."""
        try:
            self._emit("Pending", "Created", details={"folder": str(self.pod.folder)})
            for container in self.pod.init:
                while not self._stop.is_set() and not await self._run_init(container):
                    await self._pause(container.name)
                self._backoff = 0.0
            while not self._stop.is_set():
                await self._run_main(self.pod.main)
                if not self._stop.is_set():
                    await self._pause(self.pod.main.name)
            self._emit("Stopped", "Stopped")
        finally:
            self._set_ready(False)

    async def _run_init(self, container: LocalContainer) -> bool:
        process = await self._start(container, "Initializing")
        if process is None:
            return False
        code = await self._wait_or_stop(process)
        if self._stop.is_set():
            return False
        if code == 0:
            self._emit("Initializing", "InitCompleted", container.name)
            return True
        self._emit("BackOff", "InitFailed", self._exit_message(container, process, code), {"exit_code": code})
        return False

    async def _run_main(self, container: LocalContainer) -> None:
        self._ready_since = None
        process = await self._start(container, "Starting")
        if process is None:
            return
        probing = asyncio.ensure_future(watch(container, self._started, self._readiness_changed))
        waiting = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({probing, waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            # A container without a liveness probe has nothing left to ask once it is ready.
            if probing.done() and not waiting.done() and not stopping.done() and probing.exception() is None:
                await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self._set_ready(False)
            failure = probing.exception() if probing.done() else None
            probing.cancel()  # what a container says while it ends is no news
            if waiting.done():
                code = waiting.result()
                reason = "Completed" if code == 0 else "Crashed"
                self._emit("BackOff", reason, self._exit_message(container, process, code), {"exit_code": code})
            elif isinstance(failure, ProbeFailed):
                self._emit("BackOff", failure.kind, f"{failure}; restarting")
                await process.stop(self.pod.grace_seconds, self._hurry)
            elif failure is not None:
                raise failure
            else:
                await self._terminate(process)
        finally:
            for task in (probing, waiting, stopping):
                task.cancel()
            process.kill()
            await asyncio.gather(probing, waiting, stopping, return_exceptions=True)
        if self._ready_for() >= STEADY_SECONDS:
            self._backoff = 0.0

    def _ready_for(self) -> float:
        """Seconds since the running container was ready first; 0 when it never was."""
        return time.monotonic() - self._ready_since if self._ready_since is not None else 0.0

    async def _start(self, container: LocalContainer, phase: Phase) -> ContainerProcess | None:
        assert self._lock is not None, "acquire() comes first"
        try:
            process = await ContainerProcess.start(container, self.pod.folder, self._lock)
        except OSError as error:
            self._emit("BackOff", "StartError", f"{container.name}: {container.argv[0]}: {error.strerror}")
            return None
        details: dict[str, str | int] = {"container": container.name, "pid": process.pid, "log": str(process.log)}
        self._emit(phase, "ContainerStarted", f"{container.name}, pid {process.pid}, log {process.log}", details)
        return process

    async def _wait_or_stop(self, process: ContainerProcess) -> int:
        waiting = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else await process.stop(self.pod.grace_seconds, self._hurry)
        finally:
            stopping.cancel()
            process.kill()
            await asyncio.gather(waiting, stopping, return_exceptions=True)

    async def _terminate(self, process: ContainerProcess) -> None:
        self._emit("Terminating", "Draining", f"up to {self.pod.grace_seconds:g} s")
        began = time.monotonic()
        code = await process.stop(self.pod.grace_seconds, self._hurry)
        self._emit("Terminating", "ContainerStopped", f"{describe_exit(code)} after {time.monotonic() - began:.1f} s")

    async def _pause(self, name: str) -> None:
        self._backoff = min(BACKOFF_LAST_SECONDS, self._backoff * 2 or BACKOFF_FIRST_SECONDS)
        self._emit("BackOff", "Restarting", f"{name} in {self._backoff:g} s")
        try:
            await asyncio.wait_for(self._stop.wait(), self._backoff)
        except TimeoutError:
            return

    def _started(self) -> None:
        self._emit("Starting", "Started", self.pod.main.name)

    def _readiness_changed(self, ready: bool, why: str) -> None:
        self._set_ready(ready)
        if ready:
            self._ready_since = self._ready_since or time.monotonic()
            self._emit("Ready", "Ready", self.pod.url, {"url": self.pod.url, "admin_url": self.pod.admin_url})
        else:
            self._emit("NotReady", "ReadinessProbeFailed", why)

    def _set_ready(self, ready: bool) -> None:
        if ready != self._ready:
            self._ready = ready
            self._on_ready(self.pod, ready)

    def _exit_message(self, container: LocalContainer, process: ContainerProcess, code: int) -> str:
        words = process.last_words() if code > 0 else ""  # a killed process did not say why
        said = f": {words}" if words else ""
        return f"{container.name}: {describe_exit(code)}{said} (log {process.log})"

    def _emit(self, phase: Phase, reason: str, message: str = "", details: dict[str, str | int] | None = None) -> None:
        self._emit_event(Event(self.pod.key, phase, reason, message, dict(details or {})))


def _write_private(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
