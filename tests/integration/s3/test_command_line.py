"""`engram serve` and `engram snapshots` over a bucket, as a user starts them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engram_runtime.cli.main import main
from tests.support import loopback
from tests.support.engine_processes import EngineProcesses
from tests.support.ports import free_port
from tests.support.s3_process import S3Server
from tests.support.tiny import make_tiny

START_SECONDS = 240


@contextmanager
def serving(processes: EngineProcesses, folder: Path, *flags: object) -> Iterator[tuple[str, str]]:
    """(URL, admin URL) of a new process; killed at the end."""
    port, admin_port = free_port(), free_port()
    arguments = ["serve", "--model", folder / "model", "--served-model-name", "tiny", "--port", port]
    arguments += ["--admin-port", admin_port, "--max-num-seqs", 4, *flags]
    log = folder / f"serve-{port}.log"
    process = processes.start(arguments, log)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while not ready(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        yield url, f"http://127.0.0.1:{admin_port}"
    finally:
        process.kill()


def ready(url: str) -> bool:
    try:
        return loopback.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_a_bucket_from_the_command_line(
    processes: EngineProcesses, moto: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved by a server; listed, verified and deleted without it. (Restored after a death: tests/integration/local.)"""

    def snapshots(*args: object) -> tuple[int, str, str]:
        code = main(["snapshots", *map(str, args)])
        return code, *capsys.readouterr()

    make_tiny("llama", tmp_path / "model")
    key = tmp_path / "tenant-key"
    key.write_text("0123456789abcdef" * 4)
    bucket = moto.bucket()
    reach = ["--s3-endpoint-url", moto.url, "--s3-path-style", "--s3-region", "us-east-1", "--s3-encryption", "AES256"]
    reach += ["--s3-credentials-dir", moto.credentials(tmp_path / "credentials"), "--tenant-key-file", key]
    store = [f"s3://{bucket}/team a", *reach]
    with serving(processes, tmp_path, "--snapshot-store", *store) as (url, admin_url):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "conversation_id": "c",
            "max_tokens": 8,
        }
        answer = loopback.post(f"{url}/v1/chat/completions", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        until = time.monotonic() + 240
        while not (rows := in_store(url)):
            assert time.monotonic() < until
            time.sleep(0.1)
        (tier,) = [found for found in loopback.get(f"{admin_url}/status").json()["tiers"] if found["name"] == "store"]
        assert tier["ready"]
        assert "conditional writes honoured" in tier["message"]

    code, out, err = snapshots("ls", "--json", "--store", *store)
    assert code == 0, err
    assert {json.loads(line)["id"] for line in out.splitlines()} >= {row["id"] for row in rows}
    client = moto.client()
    for item in client.list_objects_v2(Bucket=bucket)["Contents"]:
        assert item["Key"].startswith("team a/")
        assert client.head_object(Bucket=bucket, Key=item["Key"])["ServerSideEncryption"] == "AES256"

    code, out, _ = snapshots("fsck", "--store", *store)
    assert (code, "0 problems" in out) == (0, True), out
    assert snapshots("rm", rows[0]["id"], "--store", *store)[0] == 0
    code, _, err = snapshots("show", rows[0]["id"], "--store", *store)
    assert (code, "does not exist" in err) == (1, True)
    code, _, err = snapshots("ls", "--store", f"s3://{bucket}-gone", *reach)
    assert (code, err.count("\n"), "NoSuchBucket" in err) == (1, 1, True), err


def in_store(url: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = loopback.get(f"{url}/v1/snapshots", params={"conversation_id": "c"}).json()["data"]
    # The last that the turn leaves behind: nothing of it is on its way any more.
    return [row for row in rows if "store" in row["tiers"] and row["boundary"] == "next_history"]
