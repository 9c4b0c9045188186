"""s3://: a checkpoint folder in a bucket."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import boto3
from botocore import UNSIGNED
from botocore.config import Config

from engram_runtime.fetching.errors import FetchError
from engram_runtime.fetching.remote import CHUNK, Digest, Listing, RemoteFile, safe_path
from engram_runtime.snapshots.io.s3.errors import Kind, classify

SCHEME = "s3://"
MAX_FILES = 10_000
log = logging.getLogger(__name__)
T = TypeVar("T")


class Bucket:
    """Implements Source. `credentials` maps AWS_* names to values; what is not in it the SDK looks for itself.

    `unsigned`: ask as anybody. ValueError for a URI that is none.
    """

    def __init__(self, uri: str, *, credentials: Mapping[str, str] | None = None, unsigned: bool = False) -> None:
        bucket, _, prefix = uri.removeprefix(SCHEME).partition("/")
        if not uri.startswith(SCHEME) or not bucket:
            raise ValueError(f"uri must be s3://BUCKET[/PREFIX], got {uri[:200]!r}")
        self._uri = uri
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._client = self._call("reach", lambda: _client(credentials or {}, unsigned))

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def requested(self) -> str | None:
        return None

    def resolve(self, revision: str | None) -> Listing:
        """A bucket has no commits: the revision is a digest of the listing, and every read asks for the same ETag."""
        found: list[dict[str, Any]] = []
        arguments: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix}
        while True:
            page = self._call("list", lambda: self._client.list_objects_v2(**arguments))
            found += page.get("Contents", [])
            if not page.get("IsTruncated") or len(found) > MAX_FILES:
                break
            arguments["ContinuationToken"] = page["NextContinuationToken"]
        if not found:
            raise FetchError("NotFound", f"{self._uri} holds nothing")
        names = {str(item["Key"])[len(self._prefix) :]: item for item in found}
        files = tuple(self._file(path, item) for path, item in sorted(names.items()) if safe_path(path))
        summary = json.dumps([[file.path, *file.identity] for file in files]).encode()
        return Listing(hashlib.sha256(summary).hexdigest()[:40], files)

    @contextmanager
    def read(self, listing: Listing, file: RemoteFile, start: int, length: int) -> Iterator[Iterator[bytes]]:
        def request() -> Any:
            return self._client.get_object(
                Bucket=self._bucket,
                Key=self._prefix + file.path,
                Range=f"bytes={start}-{start + length - 1}",
                IfMatch=file.version,
            )

        body = self._call(f"read {file.path}", request)["Body"]
        try:
            yield self._chunks(file.path, body)
        finally:
            body.close()

    def close(self) -> None:
        self._client.close()

    def _chunks(self, path: str, body: Any) -> Iterator[bytes]:
        while chunk := self._call(f"read {path}", lambda: body.read(CHUNK)):
            yield bytes(chunk)

    def _file(self, path: str, item: Mapping[str, Any]) -> RemoteFile:
        digest = self._digest(path) if path.endswith((".safetensors", ".json", ".model")) else None
        return RemoteFile(path, int(item["Size"]), digest, str(item["ETag"]))

    def _digest(self, path: str) -> Digest | None:
        """As far as the server says: a checksum of its own, or the ETag where that is one of the content."""
        key = self._prefix + path

        def head(**more: Any) -> Any:
            return self._call(f"read {path}", lambda: self._client.head_object(Bucket=self._bucket, Key=key, **more))

        answer = head(ChecksumMode="ENABLED")
        own = str(answer.get("ChecksumSHA256", ""))
        if own and "-" not in own and answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
            return Digest("sha256", base64.b64decode(own).hex())
        tag = str(answer["ETag"]).strip('"')
        if answer.get("SSECustomerAlgorithm") or answer.get("ServerSideEncryption", "AES256") != "AES256":
            return None
        value, dash, count = tag.partition("-")
        if len(value) != 32 or not set(value) <= set("0123456789abcdef"):
            return None
        if not dash:
            return Digest("md5", value)
        try:
            first = head(PartNumber=1)
        except FetchError as error:
            log.debug("%s: sizes of parts are not known: %s", path, error)
            return None
        part, size = int(first["ContentLength"]), int(answer["ContentLength"])
        # Parts of unequal sizes cannot be told from outside.
        even = part > 0 and count.isdigit() and -(-size // part) == int(count)
        return Digest("md5-parts", tag, part) if even else None

    def _call(self, action: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except Exception as error:
            failure = classify(error)
            if failure is None:
                raise
            if failure.kind is Kind.CONDITION:
                message = f"{self._uri} changed while it was being read"
                raise FetchError("Changed", message) from error
            reason = {Kind.MISSING: "NotFound", Kind.CREDENTIALS: "AccessDenied"}.get(failure.kind, failure.reason)
            raise FetchError(
                reason,
                f"cannot {action} of {self._uri}: {failure.message}",
                passing=failure.kind in (Kind.TRANSIENT, Kind.CONTENDED),
                retry_after=failure.retry_after,
            ) from error


def _client(credentials: Mapping[str, str], unsigned: bool) -> Any:
    # A session of its own: the default one is a global, and caches what the chain found.
    session = boto3.session.Session(
        aws_access_key_id=credentials.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=credentials.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=credentials.get("AWS_SESSION_TOKEN"),
        region_name=credentials.get("AWS_REGION") or credentials.get("AWS_DEFAULT_REGION"),
    )
    endpoint = credentials.get("AWS_ENDPOINT_URL_S3") or credentials.get("AWS_ENDPOINT_URL")
    config = Config(
        signature_version=UNSIGNED if unsigned else "s3v4",
        s3={"addressing_style": "path" if endpoint else "auto"},
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=10,
        read_timeout=30,
        max_pool_connections=64,
        response_checksum_validation="when_required",
        user_agent_extra="engram",
    )
    return session.client("s3", endpoint_url=endpoint, config=config)
