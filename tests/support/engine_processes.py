"""Real `engram` processes that start fast: one process imports torch once and forks for each command line.

As a program it reads one JSON line per command, forks a child that runs the command as `engram` would, and answers with
the child's process id and later with the status it ended with. What is forked has imported modules and read the
configuration and the tokenizer of a checkpoint (which is what makes transformers import the rest of itself): it has
computed nothing and started no thread. Importing takes ten times as long as most of what the tests do with a process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, NoReturn, Self

HEAVY = (
    "engram_runtime.engine.async_engine",
    "engram_runtime.cli.serving",
    "engram_runtime.models.llama",
    "engram_runtime.models.granitemoehybrid",
)
SECONDS = 600.0
"""How long a process may take to start or to end, unless a test says otherwise."""


class EngramProcess:
    """One `engram ARGUMENTS`."""

    def __init__(self, pid: int, ended: threading.Event) -> None:
        self.pid = pid
        self.code: int | None = None
        """Exit code, or minus the number of the signal that ended it. None while it runs."""
        self._ended = ended

    def poll(self) -> int | None:
        return self.code

    def wait(self, seconds: float = SECONDS) -> int:
        assert self._ended.wait(seconds), f"process {self.pid} still runs after {seconds} s"
        assert self.code is not None
        return self.code

    def send_signal(self, number: int) -> None:
        if self.code is None:
            with suppress(ProcessLookupError):  # it has ended, and nobody has told us yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.send_signal(signal.SIGKILL)
        self.wait()


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class EngineProcesses:
    """The parent's side. `model`: a checkpoint like those to be served. Leaving the context kills what still runs."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def __enter__(self) -> Self:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine_processes", str(self._model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        self._files = TemporaryDirectory(prefix="engram-processes-")
        self._runs = 0
        self._known = threading.Condition()
        self._processes: dict[int, EngramProcess] = {}
        self._newest: EngramProcess | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in list(self._processes.values()):  # who ends meanwhile is taken out
            process.send_signal(signal.SIGKILL)
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(SECONDS)
        self._listener.join(SECONDS)
        self._files.cleanup()

    def start(
        self,
        arguments: Sequence[object],
        stdout: Path,
        *,
        stderr: Path | None = None,
        stdin: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> EngramProcess:
        """A new `engram ARGUMENTS`. Output goes to the ends of the files, errors to `stdout` unless they have a file.

        environment: variables besides those of the parent.
        """
        order = {
            "arguments": [str(argument) for argument in arguments],
            "files": [str(stdin or os.devnull), str(stdout), str(stderr or stdout)],
            "environment": dict(environment or {}),
        }
        assert self._parent.stdin is not None
        with self._known:
            self._newest = None
            self._parent.stdin.write(json.dumps(order) + "\n")
            self._parent.stdin.flush()
            assert self._known.wait_for(lambda: self._newest is not None, SECONDS), "no process was forked"
            assert self._newest is not None
            return self._newest

    def run(
        self, arguments: Sequence[object], *, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> Done:
        """`engram ARGUMENTS` to its end."""
        self._runs += 1
        names = [Path(self._files.name) / f"{self._runs}.{stream}" for stream in ("in", "out", "err")]
        names[0].write_text(stdin)
        process = self.start(arguments, names[1], stderr=names[2], stdin=names[0], environment=environment)
        code = process.wait()
        return Done(code, names[1].read_text(), names[2].read_text())

    def _listen(self) -> None:
        assert self._parent.stdout is not None
        for line in self._parent.stdout:
            told: dict[str, int] = json.loads(line)
            with self._known:
                if "started" in told:
                    self._newest = self._processes[told["started"]] = EngramProcess(told["started"], threading.Event())
                    self._known.notify_all()
                else:
                    process = self._processes.pop(told["ended"])
                    process.code = told["code"]
                    process._ended.set()


def _serve_forks(model: Path) -> None:
    main = importlib.import_module("engram_runtime.cli.main").main
    for name in HEAVY:
        importlib.import_module(name)
    importlib.import_module("engram_runtime.loader.config").load_config(model)
    importlib.import_module("engram_runtime.loader.tokenizer").load_tokenizer(model)
    threads = threading.active_count()
    assert threads == 1, f"{threads} threads must not be forked"
    gc.collect()
    gc.freeze()  # the children's collectors need not go through what was imported, nor copy its pages
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for order in _orders(woken):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(woken)
            os.close(wake)
            _redirect(order["files"])
            os.environ.update(order["environment"])
            _finish(main, order["arguments"])
        print(json.dumps({"started": child}), flush=True)


def _finish(main: Callable[[list[str]], int], arguments: list[str]) -> NoReturn:
    """Run the command. The process then ends without taking the interpreter down, whose pages it shares."""
    code = 1
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _orders(woken: int) -> Iterator[dict[str, Any]]:
    """Whole lines of standard input; between them, whoever ended is reported."""
    unread = b""
    with selectors.DefaultSelector() as watch:
        watch.register(0, selectors.EVENT_READ)
        watch.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in watch.select():
                if key.fd == woken:
                    os.read(woken, 4096)
                    _report_ended()
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, unread = (unread + data).split(b"\n")
                yield from map(json.loads, lines)


def _report_ended() -> None:
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            return
        print(json.dumps({"ended": child, "code": os.waitstatus_to_exitcode(status)}), flush=True)


def _redirect(files: Sequence[str]) -> None:
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, (path, how) in enumerate(zip(files, flags, strict=True)):
        descriptor = os.open(path, how, 0o600)
        os.dup2(descriptor, stream)
        os.close(descriptor)


if __name__ == "__main__":
    _serve_forks(Path(sys.argv[1]))
