"""Digests that say whether two model directories compute the same thing.

Snapshots outlive processes and machines, so a model is identified by content. Hashing gigabytes takes long; results
are kept beside the other caches, keyed by path, size and modification time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engram_runtime.errors import CheckpointError
from engram_runtime.loader.checkpoint import Checkpoint

DIGEST_THREADS = 8

TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def weights_digest(path: Path | str, cache_dir: Path | str | None = None) -> str:
    """SHA-256 (hex) over the names and contents of a checkpoint's shards.

    cache_dir: where per-file digests are remembered; None or unwritable: nothing is. Raises CheckpointError when a
    shard is damaged or cannot be read.
    """
    cache = Path(cache_dir) if cache_dir is not None else None
    files = Checkpoint.open(path).files
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:  # hashing lets other threads run, and is slower than any disk
        digests = list(pool.map(lambda file: _cached_file_digest(file, cache), files))
    return _combine(zip((file.name for file in files), digests, strict=True))


def tokenizer_digest(path: Path | str) -> str:
    """SHA-256 (hex) over the files that decide how text becomes token ids; those a directory lacks are left out."""
    directory = Path(path)
    return _combine((name, _file_digest(directory / name)) for name in TOKENIZER_FILES if (directory / name).is_file())


def template_digest(template: str | None) -> str:
    """SHA-256 (hex) of a chat template's text; of the empty text when there is none."""
    return hashlib.sha256((template or "").encode()).hexdigest()


def _combine(parts: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(list(parts), separators=(",", ":")).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _cached_file_digest(path: Path, cache: Path | None) -> str:
    if cache is None:
        return _file_digest(path)
    stat = path.stat()
    identity = json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    entry = cache / f"{hashlib.sha256(identity.encode()).hexdigest()}.sha256"
    try:
        known = entry.read_text("ascii").strip()
    except (OSError, ValueError):
        known = ""
    if len(known) == 64 and all(character in "0123456789abcdef" for character in known):
        return known
    digest = _file_digest(path)
    _remember(entry, digest)
    return digest


def _remember(entry: Path, digest: str) -> None:
    """Write atomically; a cache that cannot be written only costs time."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            file.write(digest)
        os.replace(file.name, entry)
    except OSError:
        return
