"""Large digests without BLAKE3: helpers that many callers share, what goes wrong in them, and processes that end."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.io import digest
from tests.support import patience

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _without_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(digest._ALGORITHMS, "blake3")


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> digest._Helpers:
    """Two, whatever the machine."""
    monkeypatch.setattr(digest, "_helpers", digest._Helpers(2))
    return digest._helpers


def expected(data: bytes) -> str:
    leaves = [hashlib.sha256(data[at : at + MIB]).digest() for at in range(0, len(data), MIB)]
    return f"sha256-1m:{hashlib.sha256(b''.join(leaves)).hexdigest()}"


def hash_by(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(digest, "hashlib", SimpleNamespace(sha256=function))


def hash_threads() -> int:
    return sum(thread.name.startswith("engram-hash") for thread in threading.enumerate())


def test_many_callers_at_once_share_a_few_threads(helpers: digest._Helpers) -> None:
    before = hash_threads()
    contents = [bytes([number]) * (2 * MIB + 1000 * number) for number in range(24)]
    with ThreadPoolExecutor(12) as callers:
        found = list(callers.map(digest.digest, map(memoryview, contents)))
    assert found == [expected(content) for content in contents]
    assert hash_threads() == before + 2


def test_everybody_takes_part_and_no_piece_is_hashed_twice(
    monkeypatch: pytest.MonkeyPatch, helpers: digest._Helpers
) -> None:
    together = threading.Barrier(3)
    seen: list[tuple[str, int]] = []

    def met(piece: memoryview) -> Any:
        if isinstance(piece, memoryview):
            seen.append((threading.current_thread().name, piece[0]))
            together.wait(patience.SECONDS)  # the caller and both helpers are at it at the same time
        return hashlib.sha256(piece)

    hash_by(monkeypatch, met)
    data = b"".join(bytes([number]) * MIB for number in range(6))
    assert digest.digest(memoryview(data)) == expected(data)
    assert sorted(number for _, number in seen) == list(range(6))
    assert {name for name, _ in seen} == {threading.current_thread().name, "engram-hash-0", "engram-hash-1"}


@pytest.mark.parametrize("culprit", ["helper", "caller"])
def test_an_error_in_any_thread_is_the_callers(
    monkeypatch: pytest.MonkeyPatch, helpers: digest._Helpers, culprit: str
) -> None:
    together = threading.Barrier(3)

    def failing(piece: memoryview) -> Any:
        together.wait(patience.SECONDS)
        if threading.current_thread().name.startswith("engram-hash") == (culprit == "helper"):
            raise MemoryError("no room for a hash")
        return hashlib.sha256(piece)

    data = bytes(3 * MIB)
    with monkeypatch.context() as patch:
        hash_by(patch, failing)
        with pytest.raises(MemoryError, match="no room"):
            digest.digest(memoryview(data))
    assert digest.digest(memoryview(data)) == expected(data)  # and the helpers are still there
    digest.check(memoryview(data), expected(data), "x")
    with pytest.raises(SnapshotError, match="damaged"):
        digest.check(memoryview(data[1:] + b"!"), expected(data), "x")


def test_a_caller_that_nobody_helps_does_it_alone(
    monkeypatch: pytest.MonkeyPatch, helpers: digest._Helpers, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    data = bytes(range(250)) * 20000
    assert digest.digest(memoryview(data)) == expected(data)
    assert digest.digest(memoryview(data)) == expected(data)
    assert len(caplog.records) == 1


def test_nothing_keeps_the_bytes_of_a_digest_that_is_done(
    monkeypatch: pytest.MonkeyPatch, helpers: digest._Helpers
) -> None:
    """Neither an invitation that waits behind busy helpers, nor a helper that waits for the next one."""
    busy, go_on = threading.Barrier(4), threading.Event()

    def slow(piece: memoryview) -> Any:
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not go_on.is_set():
            busy.wait(patience.SECONDS)
            go_on.wait(patience.SECONDS)
        return hashlib.sha256(piece)

    def dies(data: np.ndarray) -> threading.Event:
        gone = threading.Event()
        weakref.finalize(data, gone.set)
        return gone

    hash_by(monkeypatch, slow)
    with ThreadPoolExecutor(1) as other:
        occupying = other.submit(digest.digest, memoryview(bytes(8 * MIB)))
        busy.wait(patience.SECONDS)  # both helpers and their caller are held up
        data = np.zeros(3 * MIB, np.uint8)
        gone = dies(data)
        assert digest.digest(data.data) == expected(bytes(3 * MIB))
        del data
        gc.collect()
        assert gone.is_set()
        go_on.set()
        assert occupying.result(patience.SECONDS) == expected(bytes(8 * MIB))
    data = np.zeros(3 * MIB, np.uint8)
    gone = dies(data)
    assert digest.digest(data.data) == expected(bytes(3 * MIB))
    del data
    assert gone.wait(patience.SECONDS)


def run(program: str) -> str:
    """What a process of its own printed."""
    begin = "import hashlib, os, threading\nfrom engram_runtime.snapshots.io import digest\n"
    begin += "digest._ALGORITHMS.pop('blake3', None)\ndata = memoryview(bytes(5 << 20))\n"
    command = [sys.executable, "-c", begin + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience.SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_process_has_helpers_of_its_own() -> None:
    program = """
first = digest.digest(data)
child = os.fork()
if not child:
    same = digest.digest(data) == first
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("engram-hash")]
    os._exit(0 if same and names else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(first, digest.digest(data) == first)
"""
    assert run(program) == f"{expected(bytes(5 * MIB))} True\n"


def test_an_interpreter_that_ends_waits_for_nobody() -> None:
    program = """
import atexit
atexit.register(lambda: print(digest.digest(data)))
for _ in range(4):
    threading.Thread(target=lambda: [digest.digest(data) for _ in range(1000)], daemon=True).start()
print(digest.digest(data))
"""
    assert run(program) == f"{expected(bytes(5 * MIB))}\n" * 2


@pytest.mark.parametrize("size", [0, 5, MIB, MIB + 1])
def test_a_digest_in_pieces_of_few_bytes_can_be_checked(size: int) -> None:
    data = bytes(size)
    digest.check(memoryview(data), expected(data), "x")
