"""Real `engram` processes that start fast: one process imports torch once and forks for each command line.

As a program it reads one JSON line per command, {"arguments": [...], "log": PATH}, forks a child that runs the command
to its end as `engram` would, and answers with the child's process id. What is forked has imported modules and read the
configuration and the tokenizer of a checkpoint (which is what makes transformers import the rest of itself): it has
computed nothing and started no thread.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from engram_runtime.loader.config import load_config
from engram_runtime.loader.tokenizer import load_tokenizer

HEAVY = ("engram_runtime.engine.async_engine", "engram_runtime.cli.serving")


class EngineProcesses:
    """The parent's side. `model`: a checkpoint like those to be served. Leaving the context kills what still runs."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine_processes", str(self._model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        self._children: list[int] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            if alive(child):
                os.kill(child, signal.SIGKILL)
        self._parent.communicate(timeout=30)

    def start(self, arguments: list[str], log: Path) -> int:
        """Process id of a new `engram ARGUMENTS`, whose output goes to the end of `log`."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps({"arguments": arguments, "log": str(log)}) + "\n")
        self._parent.stdin.flush()
        self._children.append(int(self._parent.stdout.readline()))
        return self._children[-1]

    def kill(self, child: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while alive(child):
            assert time.monotonic() < deadline
            time.sleep(0.002)


def alive(child: int) -> bool:
    try:
        os.kill(child, 0)
    except ProcessLookupError:
        return False
    return True


def _serve_forks(model: Path) -> None:
    main = importlib.import_module("engram_runtime.cli.main").main
    for name in HEAVY:
        importlib.import_module(name)
    load_config(model)
    load_tokenizer(model)
    threads = threading.active_count()
    assert threads == 1, f"{threads} threads must not be forked"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for stream in (1, 2):
                os.dup2(log, stream)
            code = 1
            try:
                code = main(order["arguments"])
            finally:
                os._exit(code)
        print(child, flush=True)


if __name__ == "__main__":
    _serve_forks(Path(sys.argv[1]))
