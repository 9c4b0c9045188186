"""Starting and ending the cluster's processes, and finding them again after whoever started them was killed.

A process belongs to the cluster when it is in one of its network namespaces, whatever its parent: so containers whose
shim is dead, and daemons of a test run that was killed, are found too, and nobody else's process ever is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.e2e.cluster.layout import Layout

END_SECONDS = 20


class Daemons:
    """`commands(node)` gives the command line of each daemon of a node or of the control plane, by program."""

    def __init__(self, layout: Layout, commands: Callable[[str], dict[str, list[str]]]) -> None:
        self.layout = layout
        self.commands = commands
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, daemon: str) -> None:
        """Starts it inside its namespace unless it runs; its log is log/DAEMON."""
        if self.running(daemon):
            return
        node, _, program = daemon.rpartition(".")
        with (self.layout.root / "log" / daemon).open("ab") as log:
            self._started[daemon] = subprocess.Popen(
                [*self.layout.enter(node), *self.commands(node)[program]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests; they take the cluster down in order
                env=self.layout.environment(),
            )
        self._note(daemon).write_text(str(self._started[daemon].pid))

    def running(self, daemon: str) -> set[int]:
        """Its process; empty when it does not run."""
        note = self._note(daemon)
        return {int(note.read_text())} & processes(self.layout, daemon.rpartition(".")[0]) if note.exists() else set()

    def known(self) -> list[str]:
        return sorted(path.name for path in (self.layout.root / "pid").glob("*"))

    def ended(self) -> list[str]:
        """Daemons of this process that ended by themselves."""
        return [daemon for daemon, process in self._started.items() if process.poll() is not None]

    def kill(self, daemon: str) -> None:
        """kill -9."""
        end(lambda: self.running(daemon))
        self._forget(daemon)

    def kill_node(self, node: str) -> None:
        """kill -9 of everything on a node, containers included, as when its power fails."""
        end_all(self.layout, node)
        for daemon in [name for name in self._started if name.startswith(f"{node}.")]:
            self._forget(daemon)

    def wait(self, what: str, ready: Callable[[], bool], seconds: float = 60) -> None:
        """RuntimeError when it is not ready in time, or at once when a daemon has ended."""
        until = time.monotonic() + seconds
        while not ready():
            if (ended := self.ended()) or time.monotonic() > until:
                raise RuntimeError(f"{what} is not ready; ended: {ended or 'nothing'}\n{self.last_words(ended)}")
            time.sleep(0.2)

    def last_words(self, daemons: Sequence[str]) -> str:
        logs = [(name, (self.layout.root / "log" / name).read_text(errors="replace")) for name in daemons]
        return "\n".join(f"{name}: ...{text[-2000:]}" for name, text in logs)

    def _note(self, daemon: str) -> Path:
        return self.layout.root / "pid" / daemon

    def _forget(self, daemon: str) -> None:
        if (process := self._started.pop(daemon, None)) is not None:
            process.wait()


def processes(layout: Layout, node: str) -> set[int]:
    """Everything that runs on a node (or the control plane), found by network namespace."""
    spaces = [Path("/run/netns", layout.netns(node))]
    spaces += layout.home(node).glob("containerd/state/*/netns/*") if node else []
    inodes, found = set(), set()
    for space in spaces:
        try:
            inodes.add(space.stat().st_ino)
        except OSError:  # removed meanwhile
            continue
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns" / "net").stat().st_ino in inodes:
                found.add(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def end_all(layout: Layout, node: str) -> None:
    """kill -9 of everything there; containers' shims leave their sockets, which are removed."""
    end(lambda: processes(layout, node))
    for address in layout.home(node).glob("containerd/state/*/k8s.io/*/address") if node else ():
        Path(address.read_text().removeprefix("unix://")).unlink(missing_ok=True)


def end(find: Callable[[], set[int]]) -> None:
    """kill -9 of what `find` finds, until it finds nothing. RuntimeError when that does not end."""
    until = time.monotonic() + END_SECONDS
    while found := find():
        if os.getpid() in found:
            raise RuntimeError("this process is inside the cluster's network namespace: it cannot end itself")
        if time.monotonic() > until:
            raise RuntimeError(f"processes {sorted(found)} do not end")
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
