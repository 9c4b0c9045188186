"""Secrets of the local mode: a dotenv file, and the tenant key, which is made once.

A key KEY of Secret NAME is the line `NAME__KEY=value`, the name in capitals with `_` for `-` and `.`; the key is kept
as written, because it becomes a file's name (for API keys: the tenant).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from engram_operator.builders.settings import TENANT_KEY_KEY, TENANT_KEY_SECRET
from engram_operator.errors import ResourceError

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*?)__([A-Za-z0-9][A-Za-z0-9_.-]*)\s*=\s*(.*)")
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}
_MINIMUM_KEY_BYTES = 32


def read_dotenv(path: Path) -> dict[tuple[str, str], str]:
    """(SECRET, key) -> value. ResourceError names file and line; values are never part of a message."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ResourceError([f"{path}: {reason}"]) from error
    entries: dict[tuple[str, str], str] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        value = _unquoted(match[3]) if match else None
        if match is None or value is None:
            problems.append(f"{path}:{number}: must be SECRET__KEY=value, for key KEY of a Secret (quotes closed)")
        else:
            entries[match[1].upper(), match[2]] = value
    if problems:
        raise ResourceError(problems)
    return entries


def _unquoted(text: str) -> str | None:
    """A dotenv value; None when a quote is not closed."""
    if text[:1] == "'":
        match = re.fullmatch(r"'([^']*)'\s*(#.*)?", text)
        return match[1] if match else None
    if text[:1] == '"':
        match = re.fullmatch(r'"((?:[^"\\]|\\.)*)"\s*(#.*)?', text)
        return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), match[1]) if match else None
    return re.split(r"\s+#", text, maxsplit=1)[0].rstrip()


class LocalSecrets:
    """Secrets by name; all namespaces of one machine share them."""

    def __init__(self, state_dir: Path, entries: Mapping[tuple[str, str], str]) -> None:
        self._tenant_key = state_dir / "tenant-key"  # the one that `engram serve` makes and uses too
        self._entries = dict(entries)

    def read(self, name: str) -> dict[str, bytes]:
        """The Secret's data; empty when nobody gave it. The tenant key is made when nobody gave one."""
        prefix = variable_prefix(name)
        data = {key: value.encode() for (secret, key), value in self._entries.items() if secret == prefix}
        if not data and name == TENANT_KEY_SECRET:
            return {TENANT_KEY_KEY: tenant_key(self._tenant_key)}
        return data


def variable_prefix(secret: str) -> str:
    """`engram-s3` is written ENGRAM_S3 in a dotenv file."""
    return re.sub(r"[^A-Za-z0-9]", "_", secret).upper()


def tenant_key(path: Path) -> bytes:
    """The key that scopes and signs snapshots: 32 random bytes as hex text, readable by this user alone.

    Made once. Losing it loses every snapshot, so a damaged file is an error and never replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(_MINIMUM_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            # link, not rename: of two that start at once, one key wins and both use it
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            fresh.unlink()
    path.chmod(0o600)
    key = path.read_bytes()
    if len(key) < _MINIMUM_KEY_BYTES:
        raise ResourceError([f"{path}: the tenant key is damaged ({len(key)} bytes): put its backup back"])
    return key
