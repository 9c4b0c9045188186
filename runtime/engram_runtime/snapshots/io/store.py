"""What the snapshot code needs from a store, and no more than S3 can give.

No rename, no directories, no append. A put is atomic: readers see all of it or nothing. Keys are opaque (policy.keys
builds them from hexadecimal). Listing is ascending by key. Conditional writes are the only concurrency control.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engram_runtime.errors import SnapshotError


class StoreUnavailable(SnapshotError):
    """The store cannot do this now. `reason` is a CamelCase word for status conditions; retrying may help.

    The message is for operators: it names addresses and keys. `public` is what users may read.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def public(self) -> str:
        return f"it does not work now ({self.reason})"


def public(error: SnapshotError) -> str:
    """An error as its words may be shown to users: without addresses, keys and paths of a store."""
    return error.public if isinstance(error, StoreUnavailable) else str(error)


class Truncated(SnapshotError):
    """An object is shorter than what was asked of it."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    size: int
    modified: float  # Unix seconds, by the store's clock


class ObjectStore(Protocol):
    """Raises errors.NotFound for a missing key, errors.Conflict for a lost condition, StoreUnavailable for trouble.

    Thread-safe; several calls may be in flight (S3: parallel ranged GETs).
    """

    def probe(self) -> None:
        """Write, read back, compare; see that a *second* conditional write is refused. StoreUnavailable if not."""

    def put(self, key: str, parts: Sequence[memoryview | bytes], *, if_absent: bool = False) -> None:
        """Store the concatenation of `parts` atomically and durably. With if_absent: Conflict when the key is there."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length), fewer when the object ends before."""

    def front(self, key: str, length: int) -> tuple[bytes, int]:
        """The first `length` bytes (fewer if the object is shorter) and the object's size, in one request."""

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        """The whole (small) object and its entity tag."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from offset `start`; Truncated when the object ends before."""

    def head(self, key: str) -> ObjectInfo: ...

    def delete(self, key: str) -> None:
        """Deleting a missing key is not an error."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """The same for many, in few requests where the store can; in no order. All are tried before StoreUnavailable
        is raised for those that stayed."""

    def now(self) -> float | None:
        """The store's clock, which `modified` is read from (Unix seconds, to the second); None where that is this
        machine's."""

    def touch(self, key: str) -> None:
        """Make `modified` now (S3: copy onto itself); NotFound when it is gone."""

    def list(self, prefix: str, *, after: str | None = None, limit: int = 1000) -> list[ObjectInfo]:
        """At most `limit` objects whose key starts with `prefix` and is greater than `after`, ascending."""

    def compare_and_swap(self, key: str, data: bytes, expected: str | None) -> str:
        """Replace the object whose tag is `expected` (None: it is absent), else Conflict. Returns the new tag."""

    def clean_uploads(self, older_than: float) -> int:
        """Remove what writers that died left half-written before `older_than` (Unix seconds); how many."""

    def close(self) -> None: ...
