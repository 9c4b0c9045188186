"""Deleting for good: many keys in one request where the server can, old versions where the bucket keeps them.

On a versioned bucket a plain delete only hides the data, and every moved head leaves its predecessor. So a delete names
every version of its key, and the periodic cleaning takes what was superseded long ago.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from engram_runtime.errors import NotFound
from engram_runtime.snapshots.io.s3.client import Connection
from engram_runtime.snapshots.io.s3.probe import Capabilities
from engram_runtime.snapshots.io.s3.transfer import Transfer
from engram_runtime.snapshots.io.store import StoreUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

BULK = 1000  # the most that DeleteObjects takes


class Removal:
    """Of full keys. Thread-safe."""

    def __init__(self, connection: Connection, transfer: Transfer, capabilities: Capabilities) -> None:
        self._connection = connection
        self._transfer = transfer
        self._capabilities = capabilities
        self._bucket = connection.options.bucket

    def delete(self, key: str) -> None:
        """A missing key is no error. Every version goes where that is possible."""
        if not (self._capabilities.versioned and self._capabilities.version_delete):
            self._delete_one({"Key": key})
            return
        # The newest last: without it the one before would be seen again.
        versions = [(entry, latest) for entry, _, latest in self._versions(key) if entry["Key"] == key]
        for newest in (False, True):
            entries = [entry for entry, latest in versions if latest is newest]
            if entries:
                self._delete_entries(entries)

    def delete_many(self, keys: Sequence[str]) -> None:
        """The same for many. StoreUnavailable when some stayed, after all were tried."""
        if not keys:
            return
        if self._capabilities.versioned and self._capabilities.version_delete:
            # Not side by side: each of them does so itself.
            _raise_first([_attempt(self.delete, key) for key in keys])
        else:
            self._delete_entries([{"Key": key} for key in keys])

    def drop_superseded(self, key: str) -> None:
        """After an overwrite on a versioned bucket: all versions but the newest."""
        if self._capabilities.versioned and self._capabilities.version_delete:
            old = [entry for entry, _, latest in self._versions(key) if entry["Key"] == key and not latest]
            if old:
                self._delete_entries(old)

    def purge(self, prefix: str, older_than: float) -> int:
        """Delete versions and markers that are not the newest of their key, from before `older_than` (Unix seconds);
        how many. Nothing on buckets without versions."""
        if not (self._capabilities.versioned and self._capabilities.version_delete):
            return 0
        count = 0
        pending: list[dict[str, str]] = []
        for entry, modified, latest in self._versions(prefix):
            if latest or modified >= older_than:
                continue
            pending.append(entry)
            if len(pending) == BULK:
                self._delete_entries(pending)
                count, pending = count + len(pending), []
        if pending:
            self._delete_entries(pending)
        return count + len(pending)

    def abort_uploads(self, prefix: str, older_than: float) -> int:
        """Drop multipart uploads that were begun before `older_than`; how many."""
        count = 0
        markers: dict[str, Any] = {}
        while True:
            page = self._request(
                "list",
                prefix,
                lambda s3, at=dict(markers): s3.list_multipart_uploads(Bucket=self._bucket, Prefix=prefix, **at),
            )
            for upload in page.get("Uploads", []):
                if upload["Initiated"].timestamp() < older_than:
                    self._transfer.abort(upload["Key"], upload["UploadId"])
                    count += 1
            if not page.get("IsTruncated"):
                return count
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _versions(self, prefix: str) -> Iterator[tuple[dict[str, str], float, bool]]:
        """(entry for a delete, its time, whether it is the newest of its key)."""
        markers: dict[str, Any] = {}
        while True:
            page = self._request(
                "list",
                prefix,
                lambda s3, at=dict(markers): s3.list_object_versions(Bucket=self._bucket, Prefix=prefix, **at),
            )
            for item in page.get("Versions", []):
                entry = {"Key": item["Key"], "VersionId": item["VersionId"]}
                yield entry, item["LastModified"].timestamp(), bool(item["IsLatest"])
            for item in page.get("DeleteMarkers", []):
                entry = {"Key": item["Key"], "VersionId": item["VersionId"]}
                yield entry, item["LastModified"].timestamp(), bool(item["IsLatest"])
            if not page.get("IsTruncated"):
                return
            markers = {"KeyMarker": page["NextKeyMarker"], "VersionIdMarker": page["NextVersionIdMarker"]}

    def _delete_entries(self, entries: Sequence[dict[str, str]]) -> None:
        if not self._capabilities.bulk_delete or len(entries) == 1:
            self._delete_singly(entries)
            return
        refused: list[dict[str, str]] = []
        for first in range(0, len(entries), BULK):
            batch = list(entries[first : first + BULK])
            answer = self._request(
                "delete",
                batch[0]["Key"],
                lambda s3, batch=batch: s3.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True}
                ),
            )
            errors = {(item["Key"], item.get("VersionId")) for item in answer.get("Errors", [])}
            refused += [entry for entry in batch if (entry["Key"], entry.get("VersionId")) in errors]
        if refused:
            log.info("%d of %d deletions in bulk were refused: one by one", len(refused), len(entries))
            self._delete_singly(refused)  # they say why, or are tried again

    def _delete_singly(self, entries: Sequence[dict[str, str]]) -> None:
        _raise_first(self._transfer.each(lambda entry: _attempt(self._delete_one, entry), entries))

    def _delete_one(self, entry: dict[str, str]) -> None:
        try:
            self._request("delete", entry["Key"], lambda s3: s3.delete_object(Bucket=self._bucket, **entry))
        except NotFound:
            return

    def _request(self, action: str, key: str, request: Any) -> Any:
        return self._connection.call(action, key, lambda attempt: request(attempt.client))


def _attempt(delete: Callable[[T], None], thing: T) -> StoreUnavailable | None:
    try:
        delete(thing)
    except StoreUnavailable as error:
        return error
    return None


def _raise_first(failures: Sequence[StoreUnavailable | None]) -> None:
    """After all were tried."""
    for failure in failures:
        if failure is not None:
            raise failure
