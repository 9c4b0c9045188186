"""What this server really does, found out at start: documentation of S3-compatible servers is not evidence.

The dangerous lie is a conditional write that is accepted and ignored, so every condition is tried where it must be
refused, and the object is read afterwards. What is missing but replaceable is noted; what cannot be replaced
(StoreUnavailable) switches the tier off with a reason.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engram_runtime.errors import Conflict, NotFound, SnapshotError
from engram_runtime.snapshots.io.s3.client import Connection
from engram_runtime.snapshots.io.s3.transfer import Transfer
from engram_runtime.snapshots.io.store import StoreUnavailable

FIRST, SECOND, RACER = b"first of the probe", b"second of the probe", b"racer "
RACERS = 4
CLEAN_SECONDS = 2.0
STALE = '"00000000000000000000000000000000"'


@dataclass(frozen=True, slots=True)
class Capabilities:
    if_none_match: bool  # PutObject with If-None-Match: * is refused where the key exists
    if_match: bool  # PutObject with If-Match is refused where the tag is another, or the key is missing
    bare_tags: bool  # If-Match wants the tag without its quotes (older Ceph)
    multipart: bool
    multipart_if_none_match: bool  # the same of CompleteMultipartUpload
    bulk_delete: bool
    versioned: bool  # deleting hides, unless the version is named
    version_delete: bool

    @property
    def conditional_writes(self) -> bool:
        return self.if_none_match and self.if_match

    def describe(self) -> str:
        """For people: how heads are kept, and what differs from the best case."""
        notes = ["conditional writes honoured" if self.conditional_writes else "conditional writes NOT honoured"]
        if not self.multipart:
            notes.append("no multipart uploads")
        elif self.conditional_writes and not self.multipart_if_none_match:
            notes.append("large writes look before they write")
        if not self.bulk_delete:
            notes.append("single deletes")
        if self.versioned and self.version_delete:
            notes.append("versioned bucket: deletes name versions")
        elif self.versioned:
            notes.append("versioned bucket, deleting versions is not allowed: deleted data stays as old versions")
        return ", ".join(notes)


class Prober:
    """Writes a few tiny objects below `folder` (a full key prefix) and takes them away again."""

    def __init__(self, connection: Connection, transfer: Transfer, folder: str) -> None:
        self._connection = connection
        self._transfer = transfer
        self._bucket = connection.options.bucket
        self._folder = folder

    def run(self) -> Capabilities:
        """StoreUnavailable when the store cannot hold snapshots, now or at all."""
        key = f"{self._folder}{secrets.token_hex(16)}"
        other, raced = f"{self._folder}{secrets.token_hex(16)}", f"{self._folder}{secrets.token_hex(16)}"
        try:
            answer = self._transfer.put(key, [FIRST], {})
            self._expect(key, FIRST)
            self._check_ranges(key)
            self._check_listing(key)
            self._check_copy(key)
            if_none_match = (
                self._refused(key, {"IfNoneMatch": "*"})
                and self._accepted(other, {"IfNoneMatch": "*"})
                and self._one_wins(raced, None)
            )
            if_match = if_none_match and self._swaps(key, other, bare=False)
            bare_tags = if_none_match and not if_match and self._swaps(key, other, bare=True)
            multipart, multipart_if_none_match = self._multipart(key)
            versioned = "VersionId" in answer
            version_delete = versioned and self._delete_version(key, answer["VersionId"])
            bulk_delete = self._bulk_delete([key, other, raced])
        finally:
            deadline = self._connection.clock.monotonic() + CLEAN_SECONDS  # of all: where writing failed, deleting will
            with suppress(SnapshotError):
                for name in (key, other, raced):
                    self._delete(name, deadline)
        return Capabilities(
            if_none_match,
            if_match or bare_tags,
            bare_tags,
            multipart,
            multipart_if_none_match,
            bulk_delete,
            versioned,
            version_delete,
        )

    def _expect(self, key: str, data: bytes) -> str:
        found, tag = self._transfer.whole(key)
        if found != data:
            raise StoreUnavailable("ReadBack", f"{self._connection.options.uri}: read back something else than written")
        return tag

    def _check_ranges(self, key: str) -> None:
        data, piece = self._transfer.fetch(key, 3, 5)
        if data != FIRST[3:8] or piece.size != len(FIRST):
            raise StoreUnavailable("RangesIgnored", f"{self._connection.options.uri}: ranged reads are not honoured")

    def _check_listing(self, key: str) -> None:
        answer = self._request("list", lambda s3: s3.list_objects_v2(Bucket=self._bucket, Prefix=key, MaxKeys=2))
        found = [(item["Key"], item["Size"]) for item in answer.get("Contents", [])]
        if found != [(key, len(FIRST))]:
            raise StoreUnavailable("Listing", f"{self._connection.options.uri}: a new object is not listed")

    def _check_copy(self, key: str) -> None:
        self._transfer.copy_onto_itself(key, len(FIRST))
        self._expect(key, FIRST)

    def _refused(self, key: str, conditions: dict[str, str]) -> bool:
        """The condition does not hold: the write must fail, and the object must stay as it is."""
        before, _ = self._transfer.whole(key)
        try:
            self._transfer.put(key, [SECOND], conditions)
            refused = False
        except Conflict:
            refused = True
        except NotFound:
            refused = False
        except StoreUnavailable as error:
            _raise_unless_unsupported(error)
            refused = False
        return self._transfer.whole(key)[0] == before and refused

    def _accepted(self, key: str, conditions: dict[str, str]) -> bool:
        """The condition holds: the write must be done."""
        written = secrets.token_bytes(16)
        try:
            self._transfer.put(key, [written], conditions)
        except (Conflict, NotFound):
            pass  # perhaps of the repetition of a request whose answer was lost: look
        except StoreUnavailable as error:
            _raise_unless_unsupported(error)
            return False
        try:
            return self._transfer.whole(key)[0] == written
        except NotFound:
            return False

    def _swaps(self, key: str, other: str, *, bare: bool) -> bool:
        """If-Match does what compare-and-swap needs. Both objects are there."""
        stale = condition_tag(STALE, bare)
        return (
            self._refused(key, {"IfMatch": stale})
            and self._accepted(key, {"IfMatch": condition_tag(self._transfer.whole(key)[1], bare)})
            and self._refused_missing(f"{self._folder}{secrets.token_hex(16)}", stale)
            and self._one_wins(other, condition_tag(self._transfer.whole(other)[1], bare))
        )

    def _one_wins(self, key: str, tag: str | None) -> bool:
        """Of several swaps at once exactly one is done. A server that looks first and writes later fails here (if it
        is unlucky: the race is real)."""
        conditions = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}

        def swap(_: int) -> bool:
            try:
                self._transfer.put(key, [RACER + secrets.token_bytes(16)], conditions)
            except (Conflict, NotFound):
                return False
            except StoreUnavailable as error:
                _raise_unless_unsupported(error)
                return False
            return True

        winners = self._transfer.each(swap, range(RACERS)).count(True)
        try:
            changed = self._transfer.whole(key)[0].startswith(RACER)
        except NotFound:
            changed = False
        return changed and winners <= 1  # 0: the winner's answer was lost, and its repetition refused

    def _refused_missing(self, key: str, stale: str) -> bool:
        """If-Match on a key that is not there must not make it."""
        try:
            self._transfer.put(key, [SECOND], {"IfMatch": stale})
        except (Conflict, NotFound):
            return True
        except StoreUnavailable as error:
            _raise_unless_unsupported(error)
            return False
        self._delete(key, None)
        return False

    def _multipart(self, key: str) -> tuple[bool, bool]:
        """Works at all; and whether its last request honours If-None-Match (here it must refuse)."""
        before, _ = self._transfer.whole(key)
        try:
            self._transfer.put_multipart(key, [SECOND], {"IfNoneMatch": "*"})
        except Conflict:
            return True, self._transfer.whole(key)[0] == before
        except NotFound:
            return False, False
        except StoreUnavailable as error:
            _raise_unless_unsupported(error)
            try:
                self._transfer.put_multipart(key, [SECOND], {})
            except StoreUnavailable as plain:
                _raise_unless_unsupported(plain)
                return False, False
        self._expect(key, SECOND)
        return True, False

    def _delete_version(self, key: str, version: str) -> bool:
        try:
            self._request("delete", lambda s3: s3.delete_object(Bucket=self._bucket, Key=key, VersionId=version))
            self._request("list", lambda s3: s3.list_object_versions(Bucket=self._bucket, Prefix=key, MaxKeys=2))
        except StoreUnavailable as error:
            if error.reason != "AccessDenied":
                _raise_unless_unsupported(error)
            return False
        return True

    def _bulk_delete(self, keys: list[str]) -> bool:
        """Servers that want another checksum refuse DeleteObjects; some answer 200 and delete nothing."""
        entries = [{"Key": key} for key in keys]
        try:
            answer = self._request(
                "delete", lambda s3: s3.delete_objects(Bucket=self._bucket, Delete={"Objects": entries, "Quiet": True})
            )
        except StoreUnavailable as error:
            if error.reason not in ("AccessDenied", "Checksum"):
                _raise_unless_unsupported(error)
            return False
        if answer.get("Errors"):
            return False
        for key in keys:
            try:
                self._transfer.size(key)
                return False
            except NotFound:
                continue
        return True

    def _delete(self, key: str, deadline: float | None) -> None:
        self._request("delete", lambda s3: s3.delete_object(Bucket=self._bucket, Key=key), deadline)

    def _request(self, action: str, request: Callable[[Any], Any], deadline: float | None = None) -> Any:
        return self._connection.call(action, self._folder, lambda attempt: request(attempt.client), deadline=deadline)


def condition_tag(tag: str, bare: bool) -> str:
    """A tag as this server wants it in If-Match."""
    return tag.strip('"') if bare else tag


def _raise_unless_unsupported(error: StoreUnavailable) -> None:
    """A refusal of the kind of request is an answer; an outage is none."""
    if error.reason not in ("NotImplemented", "Rejected"):
        raise error
