"""`engram up` with the real engine: a conversation goes on after the engine was killed, at the same address.

Once over a folder and once over a bucket, whose credentials are a Secret of the `--env-file`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.integration.local.harness import free_port_base
from tests.support import loopback
from tests.support.s3_process import S3Server
from tests.support.tiny import make_tiny

MESSAGES = [{"role": "user", "content": "My name is Ada, and I would like to hear about the bees in the garden."}]


def resources(folder: Path, storage: dict[str, Any], disk: str) -> str:
    model = {
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "EngramModel",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"uri": f"file://{make_tiny('llama', folder / 'checkpoint')}"},
            "accelerator": {"resourceName": ""},
            "snapshots": {"hostMemory": "64Mi", "disk": disk},
            "updateStrategy": {"drainTimeoutSeconds": 10},
        },
    }
    policy = {
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "SnapshotPolicy",
        "metadata": {"name": "default"},
        "spec": {"storage": storage},
    }
    return yaml.safe_dump_all([model, policy])


def wait_for(what: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next event with this reason."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        event: dict[str, Any] = json.loads(line)
        if event["reason"] == what:
            return event
    raise AssertionError(f"no {what} in:\n{''.join(seen)}")


def turn(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = loopback.post(f"{url}/v1/chat/completions", json=body, timeout=240, trust_env=False)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return reply


def test_a_conversation_survives_a_killed_engine(tmp_path: Path) -> None:
    storage = {"uri": f"file://{tmp_path}/store"}
    assert survives(tmp_path, storage, "64Mi") in ("disk", "store")
    assert any((tmp_path / "store").rglob("*"))


def test_a_conversation_survives_in_a_bucket(tmp_path: Path, moto: S3Server) -> None:
    bucket = moto.bucket()
    storage = {
        "uri": f"s3://{bucket}/team",
        "endpointURL": moto.url,
        "insecure": True,
        "forcePathStyle": True,
        "credentialsSecretRef": {"name": "engram-s3"},
    }
    env_file = tmp_path / "secrets.env"
    env_file.write_text(
        f"ENGRAM_S3__AWS_ACCESS_KEY_ID={moto.access_key}\nENGRAM_S3__AWS_SECRET_ACCESS_KEY={moto.secret_key}\n"
    )
    assert survives(tmp_path, storage, "0", "--env-file", str(env_file)) == "store"
    keys = [item["Key"] for item in moto.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys
    assert all(key.startswith("team/") for key in keys)


def survives(tmp_path: Path, storage: dict[str, Any], disk: str, *flags: str) -> str:
    """The tier from which a conversation went on after the engine's death."""
    file = tmp_path / "engram.yaml"
    file.write_text(resources(tmp_path, storage, disk))
    command = [str(Path(sys.executable).parent / "engram"), "up", "-f", str(file), "--json", *flags]
    command += ["--port-base", str(free_port_base())]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "xdg")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        started = wait_for("ContainerStarted", process)
        while started["container"] != "engine":
            started = wait_for("ContainerStarted", process)
        url = wait_for("Ready", process)["url"]
        messages = list(MESSAGES)
        first = turn(url, messages)
        stored(url, first["engram"]["conversation_id"])
        os.kill(started["pid"], signal.SIGKILL)
        assert wait_for("Ready", process)["url"] == url
        messages.append({"role": "user", "content": "And the wasps?"})
        second = turn(url, messages)
        usage, engram = second["usage"], second["engram"]
        assert engram["conversation_id"] == first["engram"]["conversation_id"]
        assert engram["restored_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert engram["restored_tokens"] >= first["usage"]["prompt_tokens"] - 1
        assert engram["restored_tokens"] + engram["prefilled_tokens"] == usage["prompt_tokens"]
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(240)
    assert json.loads((tmp_path / "xdg" / "engram" / "endpoints.json").read_text())["models"] == {}
    return str(engram["tier"])


def stored(url: str, conversation_id: str) -> None:
    """Wait until the turn is in the durable store."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        answer = loopback.get(f"{url}/v1/snapshots", params={"conversation_id": conversation_id}, trust_env=False)
        if any("store" in item["tiers"] for item in answer.raise_for_status().json()["data"]):
            return
        time.sleep(0.1)
    raise AssertionError("the turn did not reach the store")
