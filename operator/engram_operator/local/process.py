"""One container as a process: started in a session of its own, logged to a file, stopped as a kubelet stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from engram_operator.local.plan import LocalContainer

_TAIL_BYTES = 4096


class ContainerProcess:
    """A running container. `lock` is inherited by it, so that a process left behind keeps its pod's lock."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, pid_file: Path) -> None:
        self._process = process
        self._pid_file = pid_file
        self.log = log

    @classmethod
    async def start(cls, container: LocalContainer, folder: Path, lock: int) -> ContainerProcess:
        """OSError when the command cannot be executed. The log of the run before is kept beside the new one."""
        log = folder / "logs" / f"{container.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            os.replace(log, log.with_suffix(".previous.log"))
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *container.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(container.env),
                cwd=folder,
                start_new_session=True,  # a Ctrl-C at the terminal is ours to handle, in order
                pass_fds=(lock,),
            )
        pid_file = folder / f"{container.name}.pid"
        pid_file.write_text(str(process.pid))
        return cls(process, log, pid_file)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit code, negative for a signal; whatever the process started itself is gone afterwards."""
        try:
            return await self._process.wait()
        finally:
            self._signal_group(signal.SIGKILL)
            self._pid_file.unlink(missing_ok=True)

    async def stop(self, grace_seconds: float, hurry: asyncio.Event) -> int:
        """SIGTERM, then SIGKILL after the grace time or as soon as `hurry` is set."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        exited = asyncio.ensure_future(self.wait())
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait({exited, hurried}, timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not exited.done():
            self._signal_group(signal.SIGKILL)
        return await exited

    def kill(self) -> None:
        """SIGKILL now; nothing when it has ended."""
        if self._process.returncode is None:
            self._signal_group(signal.SIGKILL)

    def last_words(self) -> str:
        """The last line that says something, for the event that reports the exit."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        except OSError:
            return ""
        return next((line[:300] for line in reversed(lines) if line), "")

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
