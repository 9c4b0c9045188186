"""A bucket as an object store: `s3://` repositories shared by replicas.

Conditional writes are the server's where the probe saw them honoured; where it did not, heads are logs of append-only
objects (heads.py). Which of the two a repository uses is written into it once: replicas that disagree, or a server that
is upgraded later, must never keep heads in two places.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.clock import Clock, SystemClock
from engram_runtime.snapshots.io.s3.client import Attempt, Connection, RangeMissing
from engram_runtime.snapshots.io.s3.heads import AppendOnlyHeads
from engram_runtime.snapshots.io.s3.options import S3Options
from engram_runtime.snapshots.io.s3.probe import Capabilities, Prober, condition_tag
from engram_runtime.snapshots.io.s3.removal import Removal
from engram_runtime.snapshots.io.s3.transfer import Transfer
from engram_runtime.snapshots.io.store import ObjectInfo, StoreUnavailable

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-z]+(?:/[0-9a-z]+)*")
PROBE = "probe/"
FORMAT = "format/heads"
HIDDEN = (PROBE, "format/")
CONDITIONAL, APPEND_ONLY = b"conditional\n", b"append-only\n"
MAX_PUT = 5 << 30  # of one request


@dataclass(frozen=True, slots=True)
class _Known:
    capabilities: Capabilities
    removal: Removal
    heads: AppendOnlyHeads | None  # None: the server swaps


class S3Store:
    """Implements io.store.ObjectStore. `is_register(key)` says which keys compare_and_swap is used for.

    Nothing is asked of the server before the first call. The probe runs by itself before the first write if nobody ran
    it; `report` says what it found. `clock`: of deadlines and of pauses between tries.
    """

    def __init__(self, options: S3Options, is_register: Callable[[str], bool], clock: Clock | None = None) -> None:
        self.options = options
        self._clock: Clock = clock or SystemClock()
        self._is_register = is_register
        self._connection = Connection(options, self._clock)
        self._transfer = Transfer(self._connection)
        self._lock = threading.Lock()
        self._known: _Known | None = None
        self._append_only: bool | None = None  # as the repository says

    @property
    def report(self) -> str:
        """What the probe found, for people; empty before it."""
        known = self._known
        if known is None:
            return ""
        mode = "heads are append-only objects" if known.heads is not None else "heads move by compare-and-swap"
        return f"{known.capabilities.describe()}; {mode}"

    @property
    def supports_conditional_writes(self) -> bool:
        return self._capable().heads is None

    def probe(self) -> None:
        with self._lock:
            self._known = self._probe()

    def put(self, key: str, parts: Sequence[memoryview | bytes], *, if_absent: bool = False) -> None:
        full, known = self._full(key), self._capable()
        size = sum(memoryview(part).nbytes for part in parts)
        large = known.capabilities.multipart and size >= self.options.multipart_from_bytes
        if size > MAX_PUT and not large:
            raise StoreUnavailable("TooLarge", f"cannot write {key}: {size} bytes need multipart uploads")
        conditions: dict[str, str] = {}
        if if_absent:
            honoured = known.capabilities.multipart_if_none_match if large else known.capabilities.if_none_match
            if large or not honoured:
                # Large: bytes that are there need not be sent to be refused.
                self._require_absent(key)
            if honoured:
                conditions = {"IfNoneMatch": "*"}
        if large:
            self._transfer.put_multipart(full, parts, conditions)
        else:
            self._transfer.put(full, parts, conditions)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if self._is_register(key) and (heads := self._heads()) is not None:
            data = heads.get_tagged(key)[0]
            return data[start:] if length is None else data[start : start + length]
        full = self._full(key)
        if length is not None and length <= 0:
            self._transfer.size(full)
            return b""
        try:
            if length is None:
                return self._transfer.whole(full, start)[0]
            if length <= self.options.range_bytes:
                return self._transfer.fetch(full, start, length)[0]
            buffer = bytearray(max(0, min(length, self._transfer.size(full) - start)))
            if buffer:
                self._transfer.fill(full, start, memoryview(buffer))
            return bytes(buffer)
        except RangeMissing:
            return b""

    def front(self, key: str, length: int) -> tuple[bytes, int]:
        try:
            data, piece = self._transfer.fetch(self._full(key), 0, length)
        except RangeMissing:
            return b"", 0
        return data, piece.size

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        if self._is_register(key) and (heads := self._heads()) is not None:
            return heads.get_tagged(key)
        full = self._full(key)
        try:
            return self._transfer.whole(full)
        except RangeMissing:
            return b"", str(self._transfer.stat(full)["ETag"])

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        if len(view):
            self._transfer.fill(self._full(key), start, view)
        else:
            self._transfer.size(self._full(key))

    def head(self, key: str) -> ObjectInfo:
        if self._is_register(key) and (heads := self._heads()) is not None:
            return heads.head(key)
        answer = self._transfer.stat(self._full(key))
        return ObjectInfo(key, int(answer["ContentLength"]), answer["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        full, known = self._full(key), self._capable()
        if known.heads is not None and self._is_register(key):
            known.heads.delete(key)
        else:
            known.removal.delete(full)

    def delete_many(self, keys: Sequence[str]) -> None:
        known = self._capable()
        registers = [key for key in keys if known.heads is not None and self._is_register(key)]
        trouble: StoreUnavailable | None = None
        for key in registers:
            try:
                self.delete(key)
            except StoreUnavailable as error:
                trouble = trouble or error
        known.removal.delete_many([self._full(key) for key in keys if key not in registers])
        if trouble is not None:
            raise trouble

    def now(self) -> float | None:
        """As the server dates its answers; every one has a date."""
        page = self._connection.call(
            "list",
            "",
            lambda attempt: attempt.client.list_objects_v2(
                Bucket=self.options.bucket, Prefix=self.options.prefix, MaxKeys=1
            ),
        )
        date = page["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        try:
            return parsedate_to_datetime(date).timestamp()
        except ValueError:
            return None

    def touch(self, key: str) -> None:
        known = self._capable()
        if known.heads is not None and self._is_register(key):
            known.heads.touch(key)
            return
        full = self._full(key)
        self._transfer.copy_onto_itself(full, self._transfer.size(full))
        known.removal.drop_superseded(full)

    def compare_and_swap(self, key: str, data: bytes, expected: str | None) -> str:
        full, known = self._full(key), self._capable()
        if not self._is_register(key):
            raise ValueError(f"key must be one that is_register accepts, got {key[:80]!r}")
        if known.heads is not None:
            return known.heads.compare_and_swap(key, data, expected)
        conditions = {"IfNoneMatch": "*"}
        if expected is not None:
            conditions = {"IfMatch": condition_tag(expected, known.capabilities.bare_tags)}
        lost_answer = False

        def request(attempt: Attempt) -> Any:
            nonlocal lost_answer
            lost_answer = attempt.maybe_done
            return attempt.client.put_object(
                Bucket=self.options.bucket, Key=full, Body=data, **self.options.encryption, **conditions
            )

        try:
            return str(self._connection.call("write", key, request)["ETag"])
        except (Conflict, NotFound):
            # If-Match on a missing key is a 404 here and a 412 there.
            if lost_answer:
                return self._my_own(full, key, data)
            raise Conflict(f"{key} has moved") from None

    def _my_own(self, full: str, key: str, data: bytes) -> str:
        """The refusal may be of the repetition: the first try was carried out and its answer lost. A head counts its
        moves, so that equal bytes are this very move."""
        try:
            found, tag = self._transfer.whole(full)
        except NotFound:
            raise Conflict(f"{key} has moved") from None
        if found != data:
            raise Conflict(f"{key} has moved")
        return tag

    def clean_uploads(self, older_than: float) -> int:
        removal = self._capable().removal
        aborted = removal.abort_uploads(self.options.prefix, older_than)
        return aborted + removal.purge(self.options.prefix, older_than)

    def close(self) -> None:
        self._transfer.close()
        self._connection.close()

    # Unconditional requests, for heads that are logs

    def plain_put(self, key: str, data: bytes, within_seconds: float | None = None) -> None:
        deadline = None if within_seconds is None else self._clock.monotonic() + within_seconds
        self._transfer.put(self._full(key), [data], {}, deadline)

    def plain_get(self, key: str) -> bytes:
        try:
            return self._transfer.whole(self._full(key))[0]
        except RangeMissing:
            return b""

    def plain_list(self, prefix: str, after: str | None, limit: int) -> list[ObjectInfo]:
        """As ObjectStore.list, with entries of heads as they are."""
        found: list[ObjectInfo] = []
        skip = len(self.options.prefix)
        while len(found) < limit:
            arguments: dict[str, Any] = {
                "Bucket": self.options.bucket,
                "Prefix": self.options.prefix + prefix,
                "MaxKeys": min(1000, limit - len(found)),
            }
            if after is not None:
                arguments["StartAfter"] = self.options.prefix + after
            page = self._connection.call(
                "list",
                prefix,
                lambda attempt, given=arguments: attempt.client.list_objects_v2(**given),  # type: ignore[misc]
            )
            for item in page.get("Contents", []):
                found.append(ObjectInfo(item["Key"][skip:], int(item["Size"]), item["LastModified"].timestamp()))
            if not page.get("IsTruncated") or not page.get("Contents"):
                break
            after = found[-1].key
        return found

    def remove_all(self, keys: Sequence[str]) -> None:
        if keys:
            self._capable().removal.delete_many([self._full(key) for key in keys])

    # What is known of the server

    def _capable(self) -> _Known:
        known = self._known
        if known is not None:
            return known
        with self._lock:
            if self._known is None:
                self._known = self._probe()
            return self._known

    def _heads(self) -> AppendOnlyHeads | None:
        """How heads are kept, for readers: they may lack the right to write, so a known format needs no probe."""
        if self._known is not None:
            return self._known.heads
        if self._append_only is None:
            try:
                self._append_only = self._read_format()
            except NotFound:
                return self._capable().heads
        return self._log_of_heads() if self._append_only else None

    def _probe(self) -> _Known:
        found = Prober(self._connection, self._transfer, self.options.prefix + PROBE).run()
        append_only = self._agree_on_heads(found)
        known = _Known(
            found,
            Removal(self._connection, self._transfer, found),
            self._log_of_heads() if append_only else None,
        )
        mode = "heads are append-only objects" if append_only else "heads move by compare-and-swap"
        level = logging.INFO if found.conditional_writes else logging.WARNING
        log.log(level, "snapshot store %s: %s; %s", self.options.uri, found.describe(), mode)
        return known

    def _agree_on_heads(self, found: Capabilities) -> bool:
        """True for append-only. The first probe of a repository decides; the safe way stays safe for ever."""
        try:
            append_only = self._read_format()
        except NotFound:
            append_only = not found.conditional_writes
            self.plain_put(FORMAT, APPEND_ONLY if append_only else CONDITIONAL)
        if not append_only and not found.conditional_writes:
            raise StoreUnavailable(
                "ConditionalWrites", f"{self.options.uri}: conditional writes were honoured once and are not any more"
            )
        return append_only

    def _read_format(self) -> bool:
        written = self.plain_get(FORMAT)
        if written not in (CONDITIONAL, APPEND_ONLY):
            raise StoreUnavailable("UnknownFormat", f"{self.options.uri}{FORMAT} is not of this version")
        return written == APPEND_ONLY

    def _log_of_heads(self) -> AppendOnlyHeads:
        return AppendOnlyHeads(self, self._is_register, self._clock)

    def _require_absent(self, key: str) -> None:
        try:
            self._transfer.size(self._full(key))
        except NotFound:
            return
        raise Conflict(f"{key} exists")

    def _full(self, key: str) -> str:
        """Keys come from policy.keys; this is the second lock on the door."""
        if _KEY.fullmatch(key) is None:
            raise ValueError(f"key must be lower-case letters, digits and single slashes, got {key[:80]!r}")
        return self.options.prefix + key

    # Last, because in a class body `list` then no longer is the built-in type.
    def list(self, prefix: str, *, after: str | None = None, limit: int = 1000) -> list[ObjectInfo]:
        heads = self._heads()
        found: list[ObjectInfo] = []
        while len(found) < limit:
            wanted = limit - len(found)
            page = self.plain_list(prefix, after, wanted) if heads is None else heads.listing(prefix, after, wanted)
            found += [info for info in page if not info.key.startswith(HIDDEN)]
            if len(page) < wanted:
                break
            after = page[-1].key
        return found
