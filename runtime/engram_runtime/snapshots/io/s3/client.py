"""The boto3 client, its credentials, and the loop of attempts around every request.

The SDK's own retries are off: they know no deadline, hide that an answer was lost (which decides what a refused
conditional write means), and cannot read rotated credentials. A secret that is mounted as files is replaced at any
moment; a client is therefore rebuilt when the server says that its key is old.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import NoCredentialsError
from botocore.handlers import add_expect_header

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.clock import Clock, SystemClock
from engram_runtime.snapshots.io.s3.errors import Failure, Kind, classify
from engram_runtime.snapshots.io.s3.options import S3Options

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 3.0
REBUILDS = 3  # a mounted secret's files change one after the other: a pair may be read torn
CONTENTIONS = 5


@dataclass(frozen=True, slots=True)
class Credentials:
    access_key_id: str
    secret_access_key: str
    session_token: str | None

    @classmethod
    def read(cls, folder: Path) -> Credentials:
        """From files; the SDK's NoCredentialsError when one is missing or empty."""
        key, secret = _text(folder / "access-key-id"), _text(folder / "secret-access-key")
        if not key or not secret:
            raise NoCredentialsError
        return cls(key, secret, _text(folder / "session-token"))


class Attempt:
    """One try of one request: the client to use, and until when it may last (seconds of the connection's clock)."""

    __slots__ = ("client", "deadline", "maybe_done", "number")

    def __init__(self, client: Any, deadline: float, number: int, maybe_done: bool) -> None:
        self.client = client
        self.deadline = deadline
        self.number = number  # from 0
        self.maybe_done = maybe_done  # an earlier try may have been carried out although its answer was lost


class Connection:
    """Makes requests. Thread-safe."""

    def __init__(self, options: S3Options, clock: Clock | None = None) -> None:
        self.options = options
        self.clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._generation = 0
        self._client: Any = None

    def call(self, action: str, key: str, request: Callable[[Attempt], T], *, deadline: float | None = None) -> T:
        """`request` until it works, within the deadline: retried with jitter where that may help.

        `deadline`: of `clock`. Raises the protocol's errors; RangeMissing where nothing lies in an asked range.
        """
        until = self.clock.monotonic() + self.options.deadline_seconds if deadline is None else deadline
        number, rebuilds, contentions, maybe_done = 0, 0, 0, False
        while True:
            client, generation = None, 0
            try:
                client, generation = self._current()
                return request(Attempt(client, until, number, maybe_done))
            except Exception as error:
                failure = classify(error)
                if failure is None:
                    raise
                cause = error
            number += 1
            maybe_done = maybe_done or failure.ambiguous
            if failure.kind is Kind.RANGE:
                raise RangeMissing(key) from cause
            if failure.kind is Kind.CREDENTIALS and rebuilds < REBUILDS:
                rebuilds += 1
                self._discard(generation)
                if rebuilds == 1:
                    continue
            elif failure.kind is Kind.CONTENDED and contentions < CONTENTIONS:
                contentions += 1
            elif failure.kind is not Kind.TRANSIENT:
                raise failure.error(action, key) from cause
            self._pause(number, failure, until, action, key, cause)

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _pause(self, number: int, failure: Failure, until: float, action: str, key: str, cause: Exception) -> None:
        """Full jitter, so that replicas that failed together do not come back together."""
        ceiling = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(number, 16))
        pause = max(failure.retry_after, random.uniform(FIRST_PAUSE / 2, ceiling))
        if self.clock.monotonic() + pause >= until:
            raise failure.error(action, key) from cause
        log.debug("%s %s: %s, attempt %d in %.1f s", action, key, failure.message, number + 1, pause)
        self.clock.sleep(pause)

    def _current(self) -> tuple[Any, int]:
        with self._lock:
            if self._client is None:
                self._client = build_client(self.options)
                self._generation += 1
            return self._client, self._generation

    def _discard(self, generation: int) -> None:
        """The next request builds a new client, unless another thread has done so. Requests in flight finish."""
        with self._lock:
            if generation == self._generation and self._client is not None:
                log.info("credentials of %s were refused: reading them again", self.options.uri)
                self._client = None


class RangeMissing(SnapshotError):
    """The object ends before the first byte that was asked for."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} ends before the asked range")


def build_client(options: S3Options) -> Any:
    """A boto3 S3 client. The SDK's NoCredentialsError when credentials_dir lacks them."""
    style = "path" if options.force_path_style else ("auto" if options.amazon else "virtual")
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": style},
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=options.connect_timeout_seconds,
        read_timeout=options.read_timeout_seconds,
        max_pool_connections=options.read_parallel + options.write_parallel + 8,
        request_checksum_calculation="when_supported" if options.amazon else "when_required",
        # Bodies are checked by the digests in signed manifests; a ranged answer has no checksum of its own.
        response_checksum_validation="when_required",
        user_agent_extra="engram",
    )
    arguments: dict[str, Any] = {
        "region_name": options.region,
        "endpoint_url": options.endpoint_url,
        "config": config,
    }
    if options.ca_bundle is not None:
        arguments["verify"] = str(options.ca_bundle)
    if options.credentials_dir is not None:
        found = Credentials.read(options.credentials_dir)
        arguments |= {
            "aws_access_key_id": found.access_key_id,
            "aws_secret_access_key": found.secret_access_key,
            "aws_session_token": found.session_token,
        }
    # A session of its own: the default one is a global, and caches what the chain found.
    client = boto3.session.Session().client("s3", **arguments)
    # Waiting for "100 Continue" costs a second per upload on servers that do not send it.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return client


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
