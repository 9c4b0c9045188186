"""`engram up` as a process: exit codes, signals, and what a person sees when something must be changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.local import harness
from tests.integration.local.harness import free_port_base, manifest

PROGRAM = """
import argparse, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # nohup, and shells in the background, have tests begin with these ignored
from engram_operator.local.command import register
parser = argparse.ArgumentParser(prog="engram")
register(parser.add_subparsers(required=True))
options = parser.parse_args()
sys.exit(options.func(options))
"""


def command(tmp_path: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "xdg")}
    return [sys.executable, "-c", PROGRAM, "up", *arguments], environment


def finished(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv, environment = command(tmp_path, *arguments)
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240)


def written(tmp_path: Path, documents: list[dict[str, Any]]) -> str:
    path = tmp_path / "engram.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return str(path)


@contextmanager
def running(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    argv, environment = command(tmp_path, *arguments)
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_drains_and_exits_with_zero(tmp_path: Path, number: signal.Signals) -> None:
    file = written(tmp_path, manifest(tmp_path))
    base = free_port_base()
    with running(tmp_path, "-f", file, "--port-base", str(base), "--json") as process:
        assert process.stdout is not None
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["reason"] == "Ready":
                break
        endpoints = tmp_path / "xdg" / "engram" / "endpoints.json"
        entry = json.loads(endpoints.read_text())["models"]["tiny"]
        assert entry["pid"] == process.pid
        assert entry["endpoints"][0]["url"] == events[-1]["url"] == f"http://127.0.0.1:{base}"
        process.send_signal(number)
        rest, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert errors == ""
    assert [json.loads(line)["reason"] for line in rest.splitlines()] == ["Draining", "ContainerStopped", "Stopped"]
    assert json.loads(endpoints.read_text()) == {"version": 1, "models": {}}


def test_events_for_people_go_to_stderr(tmp_path: Path) -> None:
    file = written(tmp_path, manifest(tmp_path))
    with running(tmp_path, "-f", file, "--port-base", str(free_port_base())) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "  Ready  " in line:
                break
        process.terminate()
        output, _ = process.communicate(timeout=240)
    assert output == ""
    assert all("default/tiny-0" in line for line in lines)


def test_problems_are_lines_with_file_document_and_field(tmp_path: Path) -> None:
    model, policy = manifest(tmp_path)
    model["spec"]["replicas"] = -1
    file = written(tmp_path, [model, policy])
    done = finished(tmp_path, "-f", file)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f'engram up: {file}: EngramModel "tiny": spec.replicas: must be >= 0, got -1\n'


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    model, policy = manifest(tmp_path)
    del model["spec"]["accelerator"]
    argv, environment = command(tmp_path, "-f", written(tmp_path, [model, policy]))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert 'this machine has 0; resourceName: "" runs on the CPU' in done.stderr


def test_a_suspended_model_has_no_pods(tmp_path: Path) -> None:
    done = finished(tmp_path, "-f", written(tmp_path, manifest(tmp_path, suspend=True)))
    assert done.returncode == 0
    assert "Suspended: no pods" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: -f/--file"),
        (["-f", "x", "--port-base", "80"], "must be between 1024 and 64535, got 80"),
        (["-f", "x", "--port-base", "many"], "invalid"),
    ],
)
def test_usage(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = finished(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_missing_file(tmp_path: Path) -> None:
    done = finished(tmp_path, "-f", "nowhere.yaml", "--env-file", "none")
    assert done.returncode == 1
    assert done.stderr == "engram up: nowhere.yaml: No such file or directory\n"


def test_without_the_extra_the_message_is_what_to_install(tmp_path: Path) -> None:
    file = written(tmp_path, manifest(tmp_path))
    for library in ("yaml", "jsonschema"):
        argv, environment = command(tmp_path, "-f", file)
        argv[2] = f"import sys; sys.modules[{library!r}] = None\n{PROGRAM}"
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        assert done.stderr == f'engram up: {library} is not installed: pip install "engram-platform[operator]"\n'


def test_an_engine_left_behind_by_a_killed_up_is_named_and_not_joined(tmp_path: Path) -> None:
    file = written(tmp_path, manifest(tmp_path))
    with running(tmp_path, "-f", file, "--port-base", str(free_port_base()), "--json") as process:
        assert process.stdout is not None
        engine = 0
        for line in process.stdout:
            event = json.loads(line)
            engine = event.get("pid", engine)
            if event["reason"] == "Ready":
                break
        process.kill()
        process.wait()
    try:
        done = finished(tmp_path, "-f", file, "--port-base", str(free_port_base()))
        assert done.returncode == 1
        assert f"pod default/tiny-0 is still running (pid {engine})" in done.stderr
    finally:
        os.kill(engine, signal.SIGTERM)
    deadline = time.monotonic() + 240
    while harness.running(engine):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with running(tmp_path, "-f", file, "--port-base", str(free_port_base()), "--json") as process:
        assert process.stdout is not None
        assert any(json.loads(line)["reason"] == "Ready" for line in iter(process.stdout.readline, ""))
        process.terminate()
        process.communicate(timeout=240)
