"""Moving objects: parallel ranged reads into memory that the caller owns, and multipart writes.

One connection reaches a fraction of a network card; many ranges of one object reach it. A range or part that fails is
tried again alone. Reads and writes have pools of their own, so that a queue of saves cannot hold up a restore.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from engram_runtime.errors import Conflict, NotFound, SnapshotError
from engram_runtime.snapshots.io.s3.bodies import Upload, receive
from engram_runtime.snapshots.io.s3.client import Attempt, Connection, RangeMissing
from engram_runtime.snapshots.io.s3.errors import Interrupted
from engram_runtime.snapshots.io.store import StoreUnavailable, Truncated

A = TypeVar("A")
T = TypeVar("T")

MAX_PARTS = 10_000
MIB = 1 << 20
STREAM_FROM = MIB  # smaller bodies are sent from one copy
REREADS = 3
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_CHECKSUMS = ("ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one ranged GET said of the object."""

    size: int  # of the whole object
    tag: str


class Transfer:
    """Object bodies of one bucket. `key` is the full key everywhere. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        options = connection.options
        self._connection = connection
        self._options = options
        self._clock = connection.clock
        self._readers = ThreadPoolExecutor(options.read_parallel, "s3-read")
        self._writers = ThreadPoolExecutor(options.write_parallel, "s3-write")

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)

    # Reading

    def fetch(self, key: str, start: int, length: int) -> tuple[bytes, Piece]:
        """Bytes [start, start + length) of one request, fewer where the object ends. RangeMissing past its end."""
        buffer = bytearray()

        def request(attempt: Attempt) -> Piece:
            def room(count: int) -> memoryview:
                nonlocal buffer
                buffer = bytearray(count)
                return memoryview(buffer)

            return self._get(attempt, key, start, length, room)

        piece = self._connection.call("read", key, request)
        return bytes(buffer), piece

    def whole(self, key: str, start: int = 0) -> tuple[bytes, str]:
        """From `start` to the end, and the tag; one version of the object even while it is being replaced."""
        for _ in range(REREADS):
            data, first = self.fetch(key, start, self._options.range_bytes)
            if start + len(data) >= first.size:
                return data, first.tag
            buffer = bytearray(first.size - start)
            view = memoryview(buffer)
            view[: len(data)] = data
            with suppress(Truncated):
                if self.fill(key, start + len(data), view[len(data) :]) == first.tag:
                    return bytes(buffer), first.tag
        raise StoreUnavailable("Changing", f"cannot read {key}: it is replaced again and again")

    def fill(self, key: str, start: int, view: memoryview) -> str:
        """Fill `view` from offset `start` by parallel ranges; returns the tag. Truncated, NotFound."""
        step = self._options.range_bytes
        if len(view) <= step:
            return self._fill_range(key, start, view)

        def one(at: int) -> str:
            return self._fill_range(key, start + at, view[at : at + step])

        for _ in range(REREADS):
            tags = self._all(self._readers, one, range(0, len(view), step))
            if len(set(tags)) == 1:
                return tags[0]
        raise StoreUnavailable("Changing", f"cannot read {key}: it is replaced again and again")

    def _fill_range(self, key: str, start: int, view: memoryview) -> str:
        def room(count: int) -> memoryview:
            if count < len(view):
                raise Truncated(f"{key} ends before byte {start + len(view)}")
            return view

        def request(attempt: Attempt) -> Piece:
            return self._get(attempt, key, start, len(view), room)

        try:
            return self._connection.call("read", key, request).tag
        except RangeMissing:
            raise Truncated(f"{key} ends before byte {start + len(view)}") from None

    def _get(self, attempt: Attempt, key: str, start: int, length: int, room: Callable[[int], memoryview]) -> Piece:
        """One GET. `room(n)` gives the memory for the n bytes that will come."""
        response = attempt.client.get_object(
            Bucket=self._options.bucket, Key=key, Range=f"bytes={start}-{start + length - 1}"
        )
        body = response["Body"]
        try:
            size = self._size(response, key, start, length)
            view = room(max(0, min(length, size - start)))
        except BaseException:
            body.close()
            raise
        receive(body, view, attempt.deadline, self._clock)
        if len(view) < response["ContentLength"]:
            body.close()  # the range was ignored: the rest is on its way
        return Piece(size, response["ETag"])

    def _size(self, response: Any, key: str, start: int, length: int) -> int:
        """The object's size; what the server sends must be the range that was asked for."""
        promised = int(response["ContentLength"])
        text = response.get("ContentRange")
        if text is None:
            if start:
                raise StoreUnavailable("RangesIgnored", f"cannot read {key}: the server ignores ranges")
            return promised
        match = _CONTENT_RANGE.fullmatch(text)
        if match is None:
            raise Interrupted("ServerError", f"Content-Range is malformed: {text[:80]!r}")
        first, last, size = (int(part) for part in match.groups())
        if first != start or last + 1 != min(size, start + length) or promised != last + 1 - first:
            raise Interrupted("ServerError", f"asked for {length} bytes at {start}, got {text[:80]!r}")
        return size

    # Writing

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        conditions: dict[str, str],
        deadline: float | None = None,
    ) -> Any:
        """One PUT; the server's answer. Conflict when a condition is refused."""
        length = sum(memoryview(part).nbytes for part in parts)

        def request(attempt: Attempt) -> Any:
            body: Any = (
                Upload(parts, 0, length, attempt.deadline, self._clock) if length >= STREAM_FROM else b"".join(parts)
            )
            return attempt.client.put_object(
                Bucket=self._options.bucket, Key=key, Body=body, **self._options.encryption, **conditions
            )

        return self._connection.call("write", key, request, deadline=deadline)

    def put_multipart(self, key: str, parts: Sequence[memoryview | bytes], conditions: dict[str, str]) -> None:
        """As put, in parallel parts; the object appears with the last request. Aborted when anything fails."""
        length = sum(memoryview(part).nbytes for part in parts)
        step = max(self._options.part_bytes, _ceil(_ceil(length, MAX_PARTS), MIB) * MIB)

        def send(upload: str, number: int) -> dict[str, Any]:
            start = (number - 1) * step

            def request(attempt: Attempt) -> dict[str, Any]:
                body = Upload(parts, start, min(step, length - start), attempt.deadline, self._clock)
                answer = attempt.client.upload_part(
                    Bucket=self._options.bucket, Key=key, UploadId=upload, PartNumber=number, Body=body
                )
                return _part(number, answer)

            return self._connection.call("write", key, request)

        self._upload(key, length, range(1, _ceil(length, step) + 1), send, conditions)

    def copy_onto_itself(self, key: str, size: int) -> None:
        """A new modification time for `size` bytes that stay. NotFound when the object is gone."""
        source = {"Bucket": self._options.bucket, "Key": key}
        if size <= self._options.copy_limit_bytes:

            def request(attempt: Attempt) -> Any:
                return attempt.client.copy_object(
                    Bucket=self._options.bucket,
                    Key=key,
                    CopySource=source,
                    MetadataDirective="REPLACE",  # S3 refuses a copy onto itself that changes nothing
                    **self._options.encryption,
                )

            self._connection.call("touch", key, request)
            return
        step = max(self._options.copy_part_bytes, _ceil(size, MAX_PARTS))

        def send(upload: str, number: int) -> dict[str, Any]:
            start = (number - 1) * step

            def request(attempt: Attempt) -> dict[str, Any]:
                answer = attempt.client.upload_part_copy(
                    Bucket=self._options.bucket,
                    Key=key,
                    UploadId=upload,
                    PartNumber=number,
                    CopySource=source,
                    CopySourceRange=f"bytes={start}-{min(size, start + step) - 1}",
                )
                return _part(number, answer["CopyPartResult"])

            return self._connection.call("touch", key, request)

        self._upload(key, size, range(1, _ceil(size, step) + 1), send, {})

    def _upload(
        self,
        key: str,
        length: int,
        numbers: range,
        send: Callable[[str, int], dict[str, Any]],
        conditions: dict[str, str],
    ) -> None:
        bucket = self._options.bucket
        upload: str = self._connection.call(
            "write",
            key,
            lambda attempt: attempt.client.create_multipart_upload(Bucket=bucket, Key=key, **self._options.encryption),
        )["UploadId"]
        try:
            sent = self._all(self._writers, lambda number: send(upload, number), numbers)
            self._complete(key, upload, length, sent, conditions)
        except BaseException:
            # The caller hears of the failure itself; what this leaves, clean_uploads finds.
            with suppress(SnapshotError):
                self.abort(key, upload)
            raise

    def _complete(
        self, key: str, upload: str, length: int, sent: list[dict[str, Any]], conditions: dict[str, str]
    ) -> None:
        maybe_done = False

        def request(attempt: Attempt) -> Any:
            nonlocal maybe_done
            maybe_done = attempt.maybe_done
            return attempt.client.complete_multipart_upload(
                Bucket=self._options.bucket,
                Key=key,
                UploadId=upload,
                MultipartUpload={"Parts": sent},
                **conditions,
            )

        try:
            self._connection.call("write", key, request)
        except (Conflict, NotFound, StoreUnavailable) as error:
            # A try whose answer was lost may have succeeded: then the upload is gone and the object is there.
            lost = isinstance(error, NotFound) or getattr(error, "reason", "") == "UploadLost"
            if not (lost and maybe_done) or self.size(key) != length:
                raise

    def abort(self, key: str, upload: str) -> None:
        """Drop an unfinished upload; one that is gone is no error."""
        try:
            self._connection.call(
                "abort",
                key,
                lambda attempt: attempt.client.abort_multipart_upload(
                    Bucket=self._options.bucket, Key=key, UploadId=upload
                ),
            )
        except StoreUnavailable as error:
            if error.reason != "UploadLost":
                raise
        except NotFound:
            return

    def size(self, key: str) -> int:
        """NotFound, StoreUnavailable."""
        return int(self.stat(key)["ContentLength"])

    def stat(self, key: str) -> Any:
        """The server's answer to HEAD. NotFound, StoreUnavailable."""

        def request(attempt: Attempt) -> Any:
            try:
                return attempt.client.head_object(Bucket=self._options.bucket, Key=key)
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 403):
                    # Without a body it cannot say whether the key is old or the right is missing: a GET can.
                    attempt.client.get_object(Bucket=self._options.bucket, Key=key, Range="bytes=0-0")["Body"].close()
                raise

        return self._connection.call("read", key, request)

    def each(self, function: Callable[[A], T], items: Iterable[A]) -> list[T]:
        """Small writes side by side, results in order; the first failure is raised when all have ended."""
        return self._all(self._writers, function, items)

    def _all(self, pool: ThreadPoolExecutor, function: Callable[[A], T], items: Iterable[A]) -> list[T]:
        """Results in order. Returns or raises only when no task runs any more: they use the caller's memory."""
        futures: list[Future[T]] = []
        try:
            futures += [pool.submit(function, item) for item in items]
            wait(futures, return_when=FIRST_EXCEPTION)
        except RuntimeError as error:  # what a pool says after shutdown
            raise StoreUnavailable("Closed", str(error)) from error
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            if not future.cancelled() and (failure := future.exception()) is not None:
                raise failure
        return [future.result() for future in futures]


def _part(number: int, answer: Any) -> dict[str, Any]:
    return {"PartNumber": number, "ETag": answer["ETag"]} | {
        name: answer[name] for name in _CHECKSUMS if name in answer
    }


def _ceil(value: int, by: int) -> int:
    return -(-value // by)
