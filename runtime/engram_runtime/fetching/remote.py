"""What a source of checkpoints offers: a listing that is fixed once, and ranges of its files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from engram_runtime.fetching.errors import FetchError

CHUNK = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,254}")


@dataclass(frozen=True, slots=True)
class Digest:
    """What a file's bytes must give (lower-case hex). `git`: of a git blob. `md5-parts`: of the digests of its parts,
    `part_bytes` each, as S3 names an object that was uploaded in parts."""

    kind: Literal["sha256", "git", "md5", "md5-parts"]
    value: str
    part_bytes: int = 0

    def of(self, path: Path) -> str:
        """The file's own. OSError."""
        with path.open("rb") as file:
            if self.kind == "sha256":
                return hashlib.file_digest(file, "sha256").hexdigest()
            if self.kind == "git":
                found = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
                while chunk := file.read(CHUNK):
                    found.update(chunk)
                return found.hexdigest()
            if self.kind == "md5":
                return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            parts, count = hashlib.md5(usedforsecurity=False), 0
            while part := file.read(self.part_bytes):
                parts.update(hashlib.md5(part, usedforsecurity=False).digest())
                count += 1
            return f"{parts.hexdigest()}-{count}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`version` differs when the content may differ (an ETag); `digest` is None where the source names none."""

    path: str
    size: int
    digest: Digest | None
    version: str = ""

    @property
    def identity(self) -> list[Any]:
        """Equal for two files only if they hold the same bytes."""
        return [self.size, None if self.digest is None else f"{self.digest.kind}:{self.digest.value}", self.version]


@dataclass(frozen=True, slots=True)
class Listing:
    """`revision` names exactly this content for ever (a commit), as far as the source can."""

    revision: str
    files: tuple[RemoteFile, ...]


class Source(Protocol):
    """Thread-safe. Everything raises FetchError."""

    @property
    def uri(self) -> str: ...

    @property
    def requested(self) -> str | None:
        """The revision as the user named it."""

    def resolve(self, revision: str | None) -> Listing:
        """The files at `revision`, else at the requested one."""

    def read(
        self, listing: Listing, file: RemoteFile, start: int, length: int
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Bytes [start, start+length); may end early, which is not an error here."""

    def close(self) -> None: ...


def safe_path(path: str) -> bool:
    """Whether a name from outside may be joined to a folder: plain words, at most one folder deep."""
    steps = path.split("/")
    return len(steps) <= 2 and all(_NAME.fullmatch(step) for step in steps)


def check_size(path: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 50:
        raise FetchError("BadListing", f"the listing gives no sane size for {path[:80]!r}")
    return size
