"""moto as a separate process that checks signatures: semantics of S3 without Amazon.

`python -m tests.support.moto_server PORT` serves. Its requests are carried out one at a time, because moto itself looks
before it writes and would let two conditional writes win.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from tests.support.ports import free_port
from tests.support.s3_process import S3Server

ROOT = Path(__file__).parents[2]
POLICY = (
    '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}'
    ',{"Effect":"Allow","Action":"iam:*","Resource":"*"}]}'
)
UNSIGNED_REQUESTS = 3
START_SECONDS = 240


@contextmanager
def running_moto(*, signed: bool = True) -> Iterator[S3Server]:
    """Unsigned: a proxy may change requests on the way."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if signed:
        environment["INITIAL_NO_AUTH_ACTION_COUNT"] = str(UNSIGNED_REQUESTS)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.moto_server", str(port)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(url, process)
        access_key, secret_key = _make_user(url) if signed else ("unchecked", "unchecked")
        yield S3Server(url, access_key, secret_key, "moto")
    finally:
        process.terminate()
        process.wait(timeout=30)


def make_key(server: S3Server) -> S3Server:
    """The server with another access key, as after a rotation."""
    iam = _iam(server.url, server.access_key, server.secret_key)
    access_key, secret_key = _user(iam, f"user-{secrets.token_hex(4)}")
    return replace(server, access_key=access_key, secret_key=secret_key)


def drop_key(server: S3Server, key: S3Server) -> None:
    """Revoke it."""
    iam = _iam(server.url, server.access_key, server.secret_key)
    name = iam.get_access_key_last_used(AccessKeyId=key.access_key)["UserName"]
    iam.delete_access_key(UserName=name, AccessKeyId=key.access_key)


def _make_user(url: str) -> tuple[str, str]:
    return _user(_iam(url, "unchecked", "unchecked"), "engram")


def _user(iam: Any, name: str) -> tuple[str, str]:
    """Three requests: UNSIGNED_REQUESTS."""
    iam.create_user(UserName=name)
    iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=POLICY)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    return key["AccessKeyId"], key["SecretAccessKey"]


def _iam(url: str, access_key: str, secret_key: str) -> Any:
    return boto3.session.Session().client(
        "iam",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(retries={"total_max_attempts": 1, "mode": "standard"}),
    )


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the moto server ended with status {process.returncode}")
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=2).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the moto server does not answer")


def _serve(port: int) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, run_simple

    application = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def serial(environ: Any, start_response: Any) -> list[bytes]:
        with lock:
            answer = application(environ, start_response)
            try:
                return [b"".join(answer)]
            finally:
                getattr(answer, "close", lambda: None)()

    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections that stay open, as real servers have them
    run_simple("127.0.0.1", port, serial, threaded=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
