"""Checksums of stored tensors: BLAKE3 (about four times faster), or SHA-256 where its wheel is missing.

Large tensors are hashed by several threads: BLAKE3 is a tree by nature, SHA-256 is made one here (the hash of the
hashes of 1 MiB pieces, "sha256-1m"). A turn's 57 MB of state would otherwise take 45 ms before anybody can find it.

A checksum finds damage; it does not prove origin. Authenticity is the manifest's HMAC, which covers the checksums.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engram_runtime.errors import SnapshotError

try:
    import blake3
except ImportError:
    _HAVE_BLAKE3 = False
else:
    _HAVE_BLAKE3 = True

_PARALLEL_ABOVE = 1 << 20  # starting threads costs more than hashing a megabyte
_PIECE = 1 << 20
_THREADS = max(2, min(8, os.cpu_count() or 1))


def _blake3(data: memoryview) -> str:
    threads = blake3.blake3.AUTO if data.nbytes > _PARALLEL_ABOVE else 1
    return blake3.blake3(data, max_threads=threads).hexdigest()


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_tree(data: memoryview) -> str:
    flat = data.cast("B")
    pieces = [flat[start : start + _PIECE] for start in range(0, flat.nbytes, _PIECE)]
    if len(pieces) < 2:
        leaves = [hashlib.sha256(piece).digest() for piece in pieces]
    else:
        # hashlib lets other threads run while it hashes; starting eight of them takes less than hashing a piece.
        with ThreadPoolExecutor(min(_THREADS, len(pieces))) as pool:
            leaves = list(pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces))
    return hashlib.sha256(b"".join(leaves)).hexdigest()


_ALGORITHMS: dict[str, Callable[[memoryview], str]] = {"sha256": _sha256, "sha256-1m": _sha256_tree}
if _HAVE_BLAKE3:
    _ALGORITHMS["blake3"] = _blake3


def digest(data: memoryview) -> str:
    """ "blake3:<64 hex>", or "sha256:<64 hex>" and above 1 MiB "sha256-1m:<64 hex>"."""
    if "blake3" in _ALGORITHMS:
        algorithm = "blake3"
    else:
        algorithm = "sha256" if data.nbytes <= _PARALLEL_ABOVE else "sha256-1m"
    return f"{algorithm}:{_ALGORITHMS[algorithm](data)}"


def check(data: memoryview, expected: str, what: str) -> None:
    """SnapshotError unless `data` has the digest `expected`; also when its algorithm is not installed here."""
    algorithm, _, value = expected.partition(":")
    function = _ALGORITHMS.get(algorithm)
    if function is None:
        raise SnapshotError(f"{what}: cannot be checked, {algorithm!r} is not installed")
    if function(data) != value:
        raise SnapshotError(f"{what}: checksum does not match, the bytes are damaged")
