"""Checksums of stored tensors: BLAKE3 (about four times faster), or SHA-256 where its wheel is missing.

A checksum finds damage; it does not prove origin. Authenticity is the manifest's HMAC, which covers the checksums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from engram_runtime.errors import SnapshotError

try:
    import blake3
except ImportError:
    _HAVE_BLAKE3 = False
else:
    _HAVE_BLAKE3 = True

_PARALLEL_ABOVE = 1 << 20  # starting threads costs more than hashing a megabyte


def _blake3(data: memoryview) -> str:
    threads = blake3.blake3.AUTO if data.nbytes > _PARALLEL_ABOVE else 1
    return blake3.blake3(data, max_threads=threads).hexdigest()


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


_ALGORITHMS: dict[str, Callable[[memoryview], str]] = {"sha256": _sha256}
if _HAVE_BLAKE3:
    _ALGORITHMS["blake3"] = _blake3


def digest(data: memoryview) -> str:
    """ "blake3:<64 hex>" or "sha256:<64 hex>"."""
    algorithm = "blake3" if "blake3" in _ALGORITHMS else "sha256"
    return f"{algorithm}:{_ALGORITHMS[algorithm](data)}"


def check(data: memoryview, expected: str, what: str) -> None:
    """SnapshotError unless `data` has the digest `expected`; also when its algorithm is not installed here."""
    algorithm, _, value = expected.partition(":")
    function = _ALGORITHMS.get(algorithm)
    if function is None:
        raise SnapshotError(f"{what}: cannot be checked, {algorithm!r} is not installed")
    if function(data) != value:
        raise SnapshotError(f"{what}: checksum does not match, the bytes are damaged")
