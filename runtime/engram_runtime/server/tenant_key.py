"""The secret that scopes and signs snapshots: from a mounted file, or made once for a single machine.

Losing it loses every snapshot, so a key that exists is never replaced, and a file that cannot be read is an error
instead of a reason to make another one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

MIN_BYTES = 32


def read_tenant_key(path: Path) -> bytes:
    """At least 32 bytes, surrounding white space dropped. ValueError names the file."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"tenant_key_file {path} cannot be read: {error.strerror or error}") from error
    if len(key) < MIN_BYTES:
        raise ValueError(f"tenant_key_file {path} must hold at least {MIN_BYTES} bytes, it holds {len(key)}")
    return key


def local_tenant_key(state_dir: Path) -> Path:
    """Path of this user's own key, made with mode 0600 on first use."""
    path = state_dir / "tenant-key"
    if path.exists():
        return path
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = state_dir / f".tenant-key.{secrets.token_hex(8)}"
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # somebody else was first: then theirs is the key
            os.link(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path
