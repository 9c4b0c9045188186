"""`engram` as the first process of a container, where signals have no default action: SIGTERM ends it all the same."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 60
IGNORED = "import time; print('on', flush=True); time.sleep(600)"


def as_first_process(*arguments: str) -> subprocess.Popen[bytes]:
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def child_of(process: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


@pytest.fixture(autouse=True)
def _namespaces():
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare: a process namespace of its own")
    probe = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no process namespaces here: {probe.stderr.decode().strip()}")


def test_a_command_that_waits_ends_when_it_is_told_to():
    """The server accepts and never answers: what a download meets behind a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = ["snapshots", "ls", "--base-url", endpoint]
        process = as_first_process("-m", "engram_runtime.cli", *arguments)
        silent.settimeout(SECONDS)
        connection, _ = silent.accept()
        with connection:
            os.kill(child_of(process), signal.SIGTERM)
            assert process.wait(SECONDS) == 128 + signal.SIGTERM


def test_without_a_handler_it_would_not():
    """The premise: a first process without one ignores SIGTERM."""
    process = as_first_process("-c", IGNORED)
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    child = child_of(process)
    os.kill(child, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    os.kill(child, signal.SIGKILL)
    process.wait(SECONDS)
