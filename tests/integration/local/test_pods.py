"""The local mode with a stand-in engine: what a cluster would do to a pod happens to a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from engram_operator.errors import ResourceError
from tests.integration.local.harness import Up, about, alive, free_port_base, manifest, mode, running, tell


async def test_init_runs_before_the_engine_and_the_endpoint_follows_readiness(tmp_path: Path) -> None:
    async with Up(tmp_path, manifest(tmp_path)) as up:
        await up.event("Ready")
        (pod,) = up.pods
        document = json.loads(up.endpoints_path.read_text())
        assert up.reasons() == [
            "Created", "ContainerStarted", "InitCompleted", "ContainerStarted", "Started", "Ready"
        ]  # fmt: skip
        assert document == {
            "version": 1,
            "models": {
                "tiny": {
                    "namespace": "default",
                    "endpoints": [{"name": "tiny-0", "url": pod.url, "admin_url": pod.admin_url}],
                    "pid": os.getpid(),
                }
            },
        }
        assert mode(up.endpoints_path) == 0o600
        tell(pod, ready=0)
        await up.until(lambda: up.endpoints() == [])
        tell(pod, ready=1)
        await up.until(lambda: up.endpoints() == ["tiny-0"])
    assert up.endpoints() is None
    assert up.reasons()[-3:] == ["Draining", "ContainerStopped", "Stopped"]


async def test_paths_ports_and_variables_become_this_machines(tmp_path: Path) -> None:
    documents = manifest(tmp_path, snapshots={"hostMemory": "1Gi"})
    async with Up(tmp_path, documents) as up:
        await up.event("Ready")
        (pod,) = up.pods
        said = about(pod)
    arguments = dict(zip(said["argv"], said["argv"][1:], strict=False))
    assert arguments["--model"] == f"{tmp_path}/model"
    assert arguments["--snapshot-store"] == f"file://{tmp_path}/store"
    assert (arguments["--host"], arguments["--port"]) == ("127.0.0.1", str(pod.http_port))
    assert arguments["--admin-port"] == str(pod.http_port + 1000) == str(pod.admin_port)
    assert arguments["--snapshot-disk-path"] == str(pod.folder / "volumes" / "cache" / "snapshots" / "tiny-0")
    key = Path(arguments["--tenant-key-file"])
    assert len(key.read_bytes()) >= 32
    assert key.read_bytes() == (up.state / "tenant-key").read_bytes()
    assert mode(key) == mode(up.state / "tenant-key") == 0o600
    assert said["env"]["POD_NAME"] == "tiny-0"
    assert said["env"]["TMPDIR"] == str(pod.folder / "volumes" / "scratch")
    assert Path(said["env"]["TMPDIR"]).is_dir()
    assert said["cwd"] == str(pod.folder)


async def test_the_tenant_key_is_made_once(tmp_path: Path) -> None:
    keys = set()
    for _ in range(2):
        async with Up(tmp_path, manifest(tmp_path)) as up:
            await up.event("Ready")
            keys.add((up.state / "tenant-key").read_bytes())
    assert len(keys) == 1


async def test_a_failing_init_container_is_retried_with_a_growing_pause_and_its_last_words(tmp_path: Path) -> None:
    flag = tmp_path / "go"
    script = f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(flag)!r}).exists() else 'weights are not there')"
    async with Up(tmp_path, manifest(tmp_path, init=[sys.executable, "-c", script])) as up:
        failed = await up.event("InitFailed", 2)
        assert "exit code 1: weights are not there" in failed.message
        assert "Started" not in up.reasons()
        pauses = [event.message for event in up.events if event.reason == "Restarting"]
        assert pauses[:2] == ["model in 1 s", "model in 2 s"][: len(pauses)]
        flag.touch()
        await up.event("Ready")


async def test_a_crash_loop_says_why_and_ends_when_the_cause_does(tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    crash.touch()
    async with Up(tmp_path, manifest(tmp_path, args=["--crash-file", str(crash)])) as up:
        event = await up.event("Crashed", 2)
        assert "exit code 1: the stand-in was told to crash" in event.message
        assert event.details["exit_code"] == 1
        assert up.endpoints() is None
        crash.unlink()
        await up.event("Ready")
        assert up.endpoints() == ["tiny-0"]


async def test_a_killed_engine_comes_back_under_the_same_name_and_port(tmp_path: Path) -> None:
    async with Up(tmp_path, manifest(tmp_path)) as up:
        await up.event("Ready")
        (pod,) = up.pods
        first = about(pod)["pid"]
        kept = pod.folder / "volumes" / "cache" / "kept"
        kept.touch()
        os.kill(first, signal.SIGKILL)
        crashed = await up.event("Crashed")
        assert "killed by SIGKILL" in crashed.message
        assert up.endpoints() == []
        await up.event("Ready", 2)
        assert about(pod)["pid"] != first
        assert up.endpoints() == ["tiny-0"]
        assert kept.exists(), "an emptyDir outlives its containers"
    assert up.reasons().count("InitCompleted") == 1, "a restarted container does not run init containers again"


async def test_an_empty_dir_does_not_outlive_its_pod_and_a_claim_does(tmp_path: Path) -> None:
    documents = manifest(tmp_path, cache={"type": "PersistentVolumeClaim", "size": "1Gi"})
    for turn in range(2):
        async with Up(tmp_path, documents) as up:
            await up.event("Ready")
            (pod,) = up.pods
            scratch = pod.folder / "volumes" / "scratch" / "file"
            claimed = up.state / "volumes" / "default" / "cache-tiny-0" / "file"
            assert not scratch.exists()
            assert claimed.exists() == bool(turn)
            scratch.touch()
            claimed.touch()


async def test_a_startup_probe_that_never_succeeds_restarts_the_engine(tmp_path: Path) -> None:
    probe = {"httpGet": {"path": "/nowhere", "port": "http"}, "periodSeconds": 0.05, "failureThreshold": 4}
    async with Up(tmp_path, manifest(tmp_path, engine={"startupProbe": probe})) as up:
        event = await up.event("StartupProbeFailed")
        assert event.message.endswith("4 times; restarting")
        await up.event("ContainerStarted", 3)  # init, first, second
        assert "Started" not in up.reasons()


async def test_a_dead_engine_that_still_runs_is_restarted_by_its_liveness_probe(tmp_path: Path) -> None:
    async with Up(tmp_path, manifest(tmp_path)) as up:
        await up.event("Ready")
        (pod,) = up.pods
        first = about(pod)["pid"]
        tell(pod, live=0)
        event = await up.event("LivenessProbeFailed")
        assert "HTTP 503, 3 times" in event.message
        await up.event("Ready", 2)
        assert about(pod)["pid"] != first


async def test_drain_takes_the_endpoint_away_first_and_waits_for_the_engine(tmp_path: Path) -> None:
    async with Up(tmp_path, manifest(tmp_path, args=["--drain-seconds", "0.5"])) as up:
        await up.event("Ready")
        up.cluster.stop()
        assert up.endpoints() is None
        assert alive(about(up.pods[0])["pid"])
        began = time.monotonic()
        await up.finished()
        assert time.monotonic() - began > 0.4
    assert (up.pods[0].folder / "logs" / "engine.log").read_text().endswith("drained\n")


async def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    async with Up(tmp_path, manifest(tmp_path, args=["--drain-seconds", "never"], grace=0.4)) as up:
        await up.event("Ready")
        pid = about(up.pods[0])["pid"]
    assert not alive(pid)
    assert "killed by SIGKILL" in (await up.event("ContainerStopped")).message


async def test_a_second_stop_ends_at_once(tmp_path: Path) -> None:
    async with Up(tmp_path, manifest(tmp_path, args=["--drain-seconds", "never"], grace=600)) as up:
        await up.event("Ready")
        pid = about(up.pods[0])["pid"]
        up.cluster.stop()
        up.cluster.stop()
        await up.finished()
    assert not alive(pid)


async def test_stopping_during_init_and_during_a_pause_is_prompt(tmp_path: Path) -> None:
    async with Up(tmp_path, manifest(tmp_path, init=["sleep", "600"])) as up:
        await up.event("ContainerStarted")
    async with Up(tmp_path, manifest(tmp_path, init=["false"])) as up:
        await up.event("Restarting")
    assert up.reasons()[-1] == "Stopped"


async def test_what_the_engine_started_ends_with_it(tmp_path: Path) -> None:
    child = tmp_path / "child"
    async with Up(tmp_path, manifest(tmp_path, args=["--child-pid-file", str(child)])) as up:
        await up.event("Ready")
        pid = int(child.read_text())
        assert alive(pid)
        os.kill(about(up.pods[0])["pid"], signal.SIGKILL)
        await up.until(lambda: not running(pid))


async def test_two_replicas_and_two_models_share_the_file_and_no_port(tmp_path: Path) -> None:
    first, policy = manifest(tmp_path, replicas=2)
    second, _ = manifest(tmp_path, name="other", model={"uri": f"file://{tmp_path}/model", "name": "Org/Other 7B"})
    async with Up(tmp_path, [first, second, policy]) as up:
        await up.event("Ready", 3)
        base = up.pods[0].http_port
        assert [(pod.key, pod.http_port, pod.admin_port) for pod in up.pods] == [
            ("default/tiny-0", base, base + 1000),
            ("default/tiny-1", base + 1, base + 1001),
            ("default/other-0", base + 2, base + 1002),
        ]
        assert up.endpoints("tiny") == ["tiny-0", "tiny-1"]
        assert up.endpoints("Org/Other 7B") == ["other-0"]
        os.kill(about(up.pods[0])["pid"], signal.SIGKILL)
        await up.until(lambda: up.endpoints("tiny") == ["tiny-1"])
        await up.event("Ready", 2, "tiny-0")
        assert up.endpoints("tiny") == ["tiny-0", "tiny-1"]
        assert up.reasons("tiny-1").count("Ready") == 1, "one replica's crash is not the other's"


async def test_api_keys_come_from_the_env_file(tmp_path: Path) -> None:
    documents = manifest(tmp_path, auth={"apiKeysSecretRef": {"name": "api-keys"}})
    with pytest.raises(ResourceError, match=r'EngramModel "tiny": Secret "api-keys" is missing: write API_KEYS__KEY='):
        Up(tmp_path, documents)
    async with Up(tmp_path, documents, secrets={("API_KEYS", "alice"): "sk-1\nsk-2"}) as up:
        await up.event("Ready")
        said = about(up.pods[0])
        folder = Path(said["argv"][said["argv"].index("--api-keys-dir") + 1])
        assert [path.name for path in folder.iterdir()] == ["alice"]
        assert (folder / "alice").read_text() == "sk-1\nsk-2"
        assert mode(folder / "alice") == 0o600


async def test_a_port_in_use_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    base = free_port_base()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 1000))
        taken.listen()
        up = Up(tmp_path, manifest(tmp_path), port_base=base)
        with pytest.raises(ResourceError, match=rf"port {base + 1000} of default/tiny-0: .*in use; choose another"):
            await up.cluster.run(handle_signals=False)
    assert up.events == []


async def test_engines_run_on_when_the_endpoints_file_cannot_be_written(tmp_path: Path) -> None:
    async with Up(tmp_path, manifest(tmp_path)) as up:
        await up.event("Ready")
        up.endpoints_path.unlink()
        up.endpoints_path.mkdir()
        tell(up.pods[0], ready=0)
        event = await up.event("EndpointsNotWritten")
        assert "endpoints.json" in event.message
        tell(up.pods[0], ready=1)
        await up.event("Ready", 2)


async def test_a_pod_runs_once(tmp_path: Path) -> None:
    async with Up(tmp_path, manifest(tmp_path)) as up:
        await up.event("Ready")
        twin = Up(tmp_path, manifest(tmp_path), port_base=free_port_base())
        with pytest.raises(ResourceError, match=r"pod default/tiny-0 is still running \(pid \d+"):
            await twin.cluster.run(handle_signals=False)
        assert alive(about(up.pods[0])["pid"])
