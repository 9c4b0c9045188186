"""The `engram` command as users run it: processes, signals, files and pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import httpx
import pytest

from tests.support import loopback
from tests.support.ports import free_port
from tests.support.stopwatch import Stopwatch
from tests.support.tiny import make_tiny

START_SECONDS = 240


def run(processes, *args, stdin=""):
    return processes.run(args, stdin=stdin)


class Serving:
    """`engram serve` as a process: forked from one that has imported everything, or (`cold`) started as users do."""

    def __init__(self, processes, model, home, *flags, cold=False):
        self.port, self.admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home / f"serve-{self.port}.log"
        arguments = ["serve", "--model", str(model), "--port", str(self.port), "--admin-port", str(self.admin_port)]
        arguments += ["--max-num-seqs", "4", *flags]
        state = {"XDG_STATE_HOME": str(home / "state")}
        if not cold:
            self.process = processes.start(arguments, self.log, environment=state)
            return
        command = [sys.executable, "-m", "engram_runtime.cli", *arguments]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, stderr=output, stdout=output, env=os.environ | state)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def wait(self, path="/health/ready", status=200):
        deadline = time.monotonic() + START_SECONDS
        seen = []
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output()
            try:
                seen.append(loopback.get(self.url + path, timeout=5).status_code)
                if seen[-1] == status:
                    return seen
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError(self.output())

    def output(self):
        return self.log.read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny-llama"
    make_tiny("llama", path)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


BODY = {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}


def in_store(url, boundary):
    rows = loopback.get(f"{url}/v1/snapshots", params={"conversation_id": "c"}).json()["data"]
    return any("store" in row["tiers"] and row["boundary"] == boundary for row in rows)


def test_the_life_of_a_server(processes, model, home):
    """Up while it loads, killed, back with its memory, drained; snapshots by both ways of looking at them."""
    store = f"file://{home}/store"
    key = home / "state" / "engram" / "tenant-key"
    engram = partial(run, processes)
    with Serving(processes, model, home, "--snapshot-store", store, cold=True) as server:
        assert 503 in server.wait("/health/startup")
        server.wait()
        assert "loading weights" in server.output()
        first = loopback.post(
            f"{server.url}/v1/chat/completions", json={**BODY, "conversation_id": "c"}, timeout=240
        ).json()
        deadline = time.monotonic() + 240
        while not in_store(server.url, "next_history"):  # the last that the turn leaves behind
            assert time.monotonic() < deadline
            time.sleep(0.05)
        listed = engram("snapshots", "ls", "--base-url", server.url, "--json").stdout
        row = json.loads(listed.splitlines()[0])
        assert (row["conversation_id"], row["turn_number"]) == ("c", 1)
        server.process.kill()
        server.process.wait()
    offline = engram("snapshots", "ls", "--store", store, "--tenant-key-file", key, "--json")
    assert json.loads(offline.stdout.splitlines()[0])["id"] == row["id"], offline.stderr
    shown = engram("snapshots", "show", row["id"], "--store", store, "--tenant-key-file", key)
    assert "conversation_id  c" in shown.stdout
    wrong = home / "wrong-key"
    wrong.write_text("x" * 40)
    assert engram("snapshots", "show", row["id"], "--store", store, "--tenant-key-file", wrong).returncode == 1
    with Serving(processes, model, home, "--snapshot-store", store) as server:
        server.wait()
        body = {**BODY, "messages": [{"role": "user", "content": "More"}], "restore_from": "c:1"}
        second = loopback.post(f"{server.url}/v1/chat/completions", json=body, timeout=240).json()
        assert second["engram"]["tier"] == "store"
        assert second["engram"]["restored_tokens"] > first["usage"]["prompt_tokens"]
        chat = engram("chat", "--base-url", server.url, "--stats", "--max-tokens", 4, stdin="Hello\nMore\n")
        assert chat.returncode == 0
        assert "turn 2" in chat.stderr
        fsck = engram("snapshots", "fsck", "--base-url", f"http://127.0.0.1:{server.admin_port}")
        assert (fsck.returncode, "0 problems" in fsck.stdout) == (0, True), fsck.stdout
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(240) == 0
    fsck = engram("snapshots", "fsck", "--store", store, "--tenant-key-file", key)
    assert (fsck.returncode, "0 problems" in fsck.stdout) == (0, True), fsck.stdout
    assert engram("snapshots", "rm", row["id"], "--store", store, "--tenant-key-file", key).returncode == 0
    assert engram("snapshots", "show", row["id"], "--store", store, "--tenant-key-file", key).returncode == 1


def test_signals(processes, model, home):
    with Serving(processes, model, home, "--snapshots-disabled", "--drain-timeout", "60") as server:
        server.wait()
        body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 3900, "ignore_eos": True, "stream": True}
        with loopback.stream("POST", f"{server.url}/v1/completions", json=body, timeout=240) as response:
            lines = response.iter_lines()  # kept: dropping it would close the connection
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            while loopback.get(f"{server.url}/health/ready").status_code != 503:
                time.sleep(0.01)
            with Stopwatch() as watch:
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(240) == 130
            assert watch.seconds < 10


def test_sigterm_while_loading(processes, model, home):
    with Serving(processes, model, home, cold=True) as server:
        server.wait("/health/live")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(240) == 0


SLOW_LOAD = """
import sys, torch
from engram_runtime.server.config import ServerConfig
from engram_runtime.server.lifecycle import serve

def load():
    print("loading", flush=True)
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)

sys.exit(serve(ServerConfig(served_model_name="m", port=int(sys.argv[1]), admin_port=int(sys.argv[2])), load))
"""


def test_sigterm_while_torch_works():
    """A thread in the middle of torch cannot be unwound by the interpreter's end: that would be an abort, 134."""
    command = [sys.executable, "-c", SLOW_LOAD, str(free_port()), str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def test_batch(processes, model, tmp_path):
    engram = partial(run, processes)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello there\n\nWho wrote the book?\n")
    done = engram("batch", "--model", model, "--prompts-file", prompts, "--max-tokens", 6, "--show-stats")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["index"] for row in rows] == [1, 3]
    assert all(row["completion_tokens"] == 6 for row in rows)
    assert "2 prompts (0 failed)" in done.stderr
    assert "12 generated" in done.stderr
    lines = [
        {"messages": [{"role": "user", "content": "Hello there"}]},
        {"prompt": "Bees", "max_tokens": 3},
        {"prompt": "x " * 5000},
    ]
    structured = tmp_path / "prompts.jsonl"
    structured.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.jsonl"
    done = engram("batch", "--model", model, "--prompts-file", structured, "--max-tokens", 6, "--output", out)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert results[0]["text"] == rows[0]["text"]
    assert results[1]["completion_tokens"] == 3
    assert "error" in results[2]
    assert done.returncode == 1
    text = engram("batch", "--model", model, "--prompts-file", prompts, "--max-tokens", 6, "--text")
    assert text.stdout.startswith(rows[0]["text"])


def test_chat_with_a_checkpoint_in_this_process(processes, model):
    done = run(
        processes,
        "chat",
        "--model",
        model,
        "--stats",
        "--max-tokens",
        4,
        "--temperature",
        0,
        stdin="Hello\n/clear\nHello\n",
    )
    assert done.returncode == 0, done.stderr
    replies = done.stdout.splitlines()
    assert len(replies) == 2
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["serve", "--model", "/no/such/folder", "--snapshots-disabled"], "no/such/folder"),
        (["serve", "--model", "MODEL", "--op", "linear=nonsense", "--snapshots-disabled"], "no such backend"),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_process(processes, args, said, model):
    given = [str(model) if arg == "MODEL" else arg for arg in args]
    done = run(processes, *given, "--port", free_port(), "--admin-port", free_port())
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
